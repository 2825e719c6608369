// For tests: what ranks on simulated GPUs compute, against as many ranks on CPUs.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/collective/group_wrappers.h>
#include <lockstep/parallel.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "collective/on_ranks_testing.h"
#include "tests/simulated_gpu/cuda_runtime.h"
#include "tests/simulated_gpu/nccl.h"

namespace lockstep {

inline constexpr double kSame = 1e-9;

using Values = std::map<std::string, Tensor>;
using TrainOn = std::function<Values(const Communicator& ranks, at::Device device)>;

// Returns what all ranks' `train` returns, in host memory. The ranks' names are different, or their values equal.
inline Values values_on(int ranks, at::DeviceType type, const TrainOn& train) {
  Values all;
  std::mutex adding;
  collective::on_ranks(ranks, [&](const Group& group) {
    const at::Device device(type, type == at::kCPU ? -1 : static_cast<c10::DeviceIndex>(group.rank()));
    const c10::OptionalDeviceGuard guard(device);
    const auto mine = train(Communicator(group, 60), device);
    const std::lock_guard lock(adding);
    for (const auto& [name, value] : mine) {
      const auto [place, is_new] = all.emplace(name, value.detach().cpu().clone());
      EXPECT_TRUE(is_new || at::allclose(place->second, value.detach().cpu(), kSame, kSame)) << name;
    }
  });
  return all;
}

inline void expect_equal(const Values& values, const Values& expected) {
  EXPECT_GT(expected.size(), 0);
  EXPECT_EQ(values.size(), expected.size());
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(values.contains(name)) << name;
    EXPECT_LT((values.at(name) - value).abs().max().item<double>(), kSame) << name;
  }
}

inline void expect_as_on_cpus(int ranks, const TrainOn& train) {
  const auto calls = simulated_nccl_calls();
  expect_equal(values_on(ranks, at::kCUDA, train), values_on(ranks, at::kCPU, train));
  EXPECT_GT(simulated_nccl_calls(), calls);
}

// As expect_as_on_cpus, for GPUs whose Groups do not use NCCL.
inline void expect_through_host(int ranks, const TrainOn& train) {
  const auto calls = simulated_nccl_calls();
  const auto values = values_on(ranks, at::kCUDA, [&](const Communicator& of, at::Device device) {
    return train(Communicator(with_gpus(of.group(), "host"), 60), device);
  });
  expect_equal(values, values_on(ranks, at::kCPU, train));
  EXPECT_EQ(simulated_nccl_calls(), calls);
}

// Returns how much all ranks together add to a count of the process while each acts. Collective.
inline std::int64_t added_while(const Communicator& ranks, const std::function<std::int64_t()>& count,
                                const std::function<void()>& act) {
  const auto meet = [&] { ranks.group().barrier(ranks.deadline()); };
  meet();
  const auto before = count();
  meet();
  act();
  meet();
  const auto added = count() - before;
  meet();
  return added;
}

// Calls `act` on all ranks, and expects that all together copy `to_host` tensors to the host. Numbers that the host
// reads by Tensor::item are not counted.
inline void expect_copies(const Communicator& ranks, std::int64_t to_host, const std::function<void()>& act) {
  EXPECT_EQ(added_while(ranks, simulated_gpu_copies_to_host, act), to_host);
}

// The module's parameters as wholes.
inline Values whole_parameters(const torch::nn::Module& module) {
  Values all;
  for (const auto& each : module.named_parameters()) all[each.key()] = full_tensor(each.value());
  return all;
}

// Each piece of a stream's work begins late, so that a missing wait shows.
class ParallelOnGpus : public testing::Test {
 protected:
  void SetUp() override { simulated_gpu_delay(50); }
  void TearDown() override { simulated_gpu_delay(0); }
};

}  // namespace lockstep
