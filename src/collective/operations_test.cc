// Every operation, dtype, operator, algorithm and backend against a plain loop, for 1 to 9 ranks and odd sizes.
#include <gtest/gtest.h>

#include "base/text.h"
#include "collective/gpus/gpus_testing.h"
#include "collective/operations_testing.h"

namespace lockstep::collective {
namespace {

struct Setting {
  std::string backend;
  Implementation implementation = Implementation::automatic;
  int ranks_per_host = 1 << 20;
  std::string network = "tcp", gpu_backend = {};  // with a gpu_backend buffers are moved through GPUs
};

std::string name_of(const std::tuple<Setting, int>& parameter) {
  const auto& [setting, size] = parameter;
  const auto& [backend, implementation, per_host, network, gpu_backend] = setting;
  return text(backend, "_", lockstep::name_of(implementation), gpu_backend.empty() ? "" : "_gpus_" + gpu_backend,
              backend == "hierarchical" ? text("_", per_host, "_", network) : "", "_", size);
}

class AnyGroup : public testing::TestWithParam<std::tuple<Setting, int>> {
 protected:
  int size() const { return std::get<1>(GetParam()); }

  void on_ranks(const std::function<void(const Group&)>& body) const {
    const auto& [backend, implementation, per_host, network, gpu_backend] = std::get<0>(GetParam());
    RankOptions options{.size = size(), .ranks_per_host = per_host, .wrap = gpus::through_gpus(gpu_backend)};
    options.group.backend = backend;
    options.group.implementation = implementation;
    options.group.network = network;
    options.group.heap_bytes = 64 << 20;
    expect_no_errors(run_ranks(options, body));
  }
};

TEST_P(AnyGroup, Reductions) {
  on_ranks([&](const Group& group) { check_reductions(group); });
}

TEST_P(AnyGroup, Distributions) {
  on_ranks([&](const Group& group) { check_distributions(group); });
}

TEST(Windows, BuffersThatNeedSeveralComeThroughWhole) {
  for (const int size : {2, 3}) {
    expect_no_errors(
        run_ranks({.size = size, .group = {.backend = "shm", .heap_bytes = 1 << 20}}, [&](const Group& group) {
          const std::size_t count = 700'001;  // floats: more than a window of 2 MiB
          std::vector<float> values(count), all(count * static_cast<std::size_t>(size));
          const auto fill = [&](int rank) {
            for (std::size_t i = 0; i < count; ++i)
              values[i] = static_cast<float>((i + static_cast<std::size_t>(rank)) % 1000);
          };
          fill(group.rank());
          group.all_gather(buffer_of(std::span(values)), buffer_of(std::span(all)), soon());
          group.all_reduce(buffer_of(std::span(values)), ReduceOp::max, soon());
          for (std::size_t i = 0; i < count; ++i) {
            float largest = 0;
            for (int r = 0; r < size; ++r) {
              const float theirs = all[static_cast<std::size_t>(r) * count + i];
              ASSERT_EQ(theirs, static_cast<float>((i + static_cast<std::size_t>(r)) % 1000));
              largest = std::max(largest, theirs);
            }
            ASSERT_EQ(values[i], largest);
          }
          std::vector<float> part(count / static_cast<std::size_t>(size));
          const Buffer whole{all.data(), part.size() * static_cast<std::size_t>(size), DType::float32};
          group.reduce_scatter(whole, buffer_of(std::span(part)), ReduceOp::sum, soon());
          const auto begin = part.size() * static_cast<std::size_t>(group.rank());
          for (std::size_t i = 0; i < part.size(); i += 997)
            ASSERT_EQ(part[i], all[begin + i] * static_cast<float>(size));
        }));
  }
}

TEST_P(AnyGroup, MessagesInAnyOrderOfSizes) {
  on_ranks([&](const Group& group) { check_messages(group); });
}

TEST_P(AnyGroup, AllRanksGetTheSameBitsAndGroupedCallsTheSameAsSingleOnes) {
  on_ranks([&](const Group& group) { check_grouped_calls(group); });
}

TEST_P(AnyGroup, SplitMakesGroupsThatWork) {
  on_ranks([&](const Group& group) { check_split(group); });
}

TEST_P(AnyGroup, MeansOf16BitsDoNotOverflowOnTheWay) {
  if (std::get<0>(GetParam()).implementation != Implementation::automatic) return;  // some send partial sums
  on_ranks([&](const Group& group) { check_means_of_16_bits(group); });
}

std::vector<Setting> settings() {
  std::vector<Setting> all{{"threads"},
                           {"shm"},
                           {"hierarchical", Implementation::automatic, 2},
                           {"hierarchical", Implementation::automatic, 3},
                           {.backend = "threads", .gpu_backend = "nccl"},
                           {.backend = "tcp", .gpu_backend = "nccl"},
                           {.backend = "shm", .gpu_backend = "host"}};
  for (int i = 0; i <= static_cast<int>(Implementation::reduction_to_one_device); ++i) {
    all.push_back({"tcp", static_cast<Implementation>(i)});
  }
  if (transport::ucx_is_built()) {
    all.push_back({"ucx"});
    all.push_back({"ucx", Implementation::ring});
    all.push_back({"hierarchical", Implementation::automatic, 2, "ucx"});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Backends, AnyGroup,
                         testing::Combine(testing::ValuesIn(settings()), testing::Range(1, kMostRanks + 1)),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace lockstep::collective
