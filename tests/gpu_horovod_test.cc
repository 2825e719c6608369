// Horovod's front end on simulated GPUs, a thread and a GPU for each rank: the results of as many ranks on CPUs. No
// tensor goes through host memory.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <optional>

#include "base/expect_says_testing.h"
#include "front_ends/horovod/on_stream.h"
#include "front_ends/horovod/ranks_testing.h"
#include "tests/host_reads.h"
#include "tests/simulated_gpu/cuda_runtime.h"
#include "tests/simulated_gpu/nccl.h"

namespace lockstep {
namespace {

namespace hvd = horovod;
using hvd::Tensors;

constexpr double kLargestDifference = 1e-9;
constexpr int kLoopSteps = 8;

Tensor numbers_of(int rank, at::IntArrayRef sizes, at::ScalarType dtype = at::kDouble) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(rank + 1));
  return at::randint(-9, 9, sizes, generator, at::kDouble).to(dtype);
}

Tensors moved_to(at::Device device, const Tensors& tensors) {
  Tensors moved;
  for (const auto& tensor : tensors) moved.push_back(tensor.to(device));
  return moved;
}

// A rank's GPU, and a stream there that is not the default one; nothing for a rank on a CPU.
class Place {
 public:
  explicit Place(at::Device device) {
    if (device.is_cuda()) guard_.emplace(hvd::stream_of_pool(device));
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

// One rank of a test.
struct Rank {
  // From here on the host reads nothing on a GPU. All ranks call it.
  void read_no_more() {
    hvd::barrier();
    reads = host_reads();
    hvd::barrier();
  }

  int number;
  at::Device device;
  std::int64_t reads = 0;
};

// `act` makes a rank's results from the inputs that `prepare` returns. On GPUs the host reads nothing meanwhile.
using Prepare = std::function<Tensors(int rank)>;
using Act = std::function<Tensors(Rank& rank, Tensors& inputs)>;

std::vector<Tensors> results_of(int ranks, bool on_gpus, const Prepare& prepare, const Act& act) {
  std::vector<Tensors> results(static_cast<std::size_t>(ranks));
  hvd::on_ranks(ranks, [&](int rank) {
    const auto device = on_gpus ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(rank)) : at::Device(at::kCPU);
    const Place place(device);
    auto inputs = moved_to(device, prepare(rank));
    Rank mine{rank, device};
    mine.read_no_more();
    const auto outputs = act(mine, inputs);
    hvd::barrier();
    EXPECT_EQ(host_reads(), mine.reads);
    hvd::barrier();
    for (const auto& output : outputs) EXPECT_EQ(output.device(), device);
    results[static_cast<std::size_t>(rank)] = moved_to(at::kCPU, outputs);
  });
  return results;
}

void expect_as_on_cpus(int ranks, const Prepare& prepare, const Act& act) {
  const auto expected = results_of(ranks, false, prepare, act);
  const auto calls = simulated_nccl_calls();
  const auto results = results_of(ranks, true, prepare, act);
  EXPECT_GT(simulated_nccl_calls(), calls);
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    ASSERT_EQ(results[rank].size(), expected[rank].size());
    for (std::size_t i = 0; i < results[rank].size(); ++i) {
      SCOPED_TRACE(testing::Message() << "rank " << rank << ", result " << i);
      const auto &result = results[rank][i], &other = expected[rank][i];
      ASSERT_EQ(result.sizes(), other.sizes());
      EXPECT_EQ(result.scalar_type(), other.scalar_type());
      if (result.numel() == 0) continue;
      EXPECT_LE((result.to(at::kDouble) - other.to(at::kDouble)).abs().max().item<double>(), kLargestDifference);
    }
  }
}

class GpuHorovod : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { simulated_gpu_delay(50); }
  void TearDown() override { simulated_gpu_delay(0); }
};

TEST_P(GpuHorovod, AllreducesAreThoseOfCpus) {
  const auto prepare = [](int rank) {
    Tensors all;
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte}) {
      all.push_back(numbers_of(rank, {2, 3}).abs().to(dtype));
    }
    all.push_back(numbers_of(rank, {3, 4}).t());  // no contiguous memory
    all.push_back(numbers_of(rank, {}));
    all.push_back(numbers_of(rank, {0, 2}));
    return all;
  };
  expect_as_on_cpus(GetParam(), prepare, [](Rank&, Tensors& inputs) {
    Tensors results;
    for (const auto& input : inputs) {
      for (const auto op : {hvd::Sum, hvd::Min, hvd::Max}) results.push_back(hvd::allreduce(input, {.op = op}));
    }
    results.push_back(hvd::allreduce(inputs[1]));
    results.push_back(hvd::allreduce(inputs[7], {.op = hvd::Product}));
    results.push_back(
        hvd::allreduce(inputs[1], {.op = hvd::Sum, .prescale_factor = 0.5, .postscale_factor = 3, .name = "scaled"}));
    for (const auto compression : {hvd::Compression::fp16, hvd::Compression::bf16}) {
      results.push_back(hvd::allreduce(inputs[0], {.op = hvd::Sum, .compression = compression}));
    }
    for (auto& result : hvd::grouped_allreduce(inputs, {.op = hvd::Sum})) results.push_back(result);
    return results;
  });
}

TEST_P(GpuHorovod, OtherOperationsAreThoseOfCpus) {
  const int ranks = GetParam();
  const auto prepare = [&](int rank) {
    return Tensors{numbers_of(rank, {rank + 1, 2}), numbers_of(rank, {rank == 1 ? 0 : 2, 3}), numbers_of(rank, {5, 2}),
                   numbers_of(rank, {ranks, 2}, at::kFloat)};
  };
  expect_as_on_cpus(ranks, prepare, [&](const Rank& rank, Tensors& inputs) {
    Tensors results{hvd::allgather(inputs[0]), hvd::allgather(inputs[1])};
    for (auto& result : hvd::grouped_allgather({inputs[0], inputs[3]})) results.push_back(result);
    results.push_back(hvd::broadcast(inputs[2], 1));
    results.push_back(hvd::alltoall(inputs[3]).output);
    std::vector<std::int64_t> splits(static_cast<std::size_t>(ranks), 0);
    splits[static_cast<std::size_t>(rank.number)] = 2;
    splits[0] += 3;
    const auto exchanged = hvd::alltoall(inputs[2], splits);
    EXPECT_EQ(exchanged.received_splits.size(), splits.size());
    results.push_back(exchanged.output);
    results.push_back(hvd::reducescatter(inputs[2], {.op = hvd::Sum}));
    for (auto& result : hvd::grouped_reducescatter({inputs[2], inputs[3]}, {.op = hvd::Max})) results.push_back(result);
    return results;
  });
}

TEST_P(GpuHorovod, InPlaceAndAsynchronousOperationsTakeTensorsAsTheyAre) {
  const auto prepare = [](int rank) { return Tensors{numbers_of(rank, {64}), numbers_of(rank, {3, 2})}; };
  expect_as_on_cpus(GetParam(), prepare, [](Rank&, Tensors& inputs) {
    auto changing = inputs[0].clone().mul_(2);
    const auto first = hvd::allreduce_async(changing, {.op = hvd::Sum});
    const auto second = hvd::broadcast_async(changing, 1);
    const auto third = hvd::allgather_async(changing);
    changing.zero_();
    Tensors results{hvd::synchronize(third) + 1, hvd::synchronize(first) + 1, hvd::synchronize(second) + 1};
    auto in_place = inputs[1].clone();
    const auto fourth = hvd::allreduce_async_(in_place, {.op = hvd::Sum});
    while (!hvd::poll(fourth)) std::this_thread::yield();  // ends by the operation's deadline
    hvd::synchronize(fourth);
    results.push_back(in_place * 2);
    auto others = Tensors{inputs[0].clone(), inputs[1].clone()};
    hvd::grouped_allreduce_(others, {.op = hvd::Sum});
    hvd::broadcast_(inputs[1], 0);
    results.insert(results.end(), {others[0] + 1, others[1] + 1, inputs[1] + 1});
    return results;
  });
}

// The result is for the stream on which it is waited for.
TEST_P(GpuHorovod, AnotherStreamMayWaitForTheResult) {
  const auto prepare = [](int rank) { return Tensors{numbers_of(rank, {1000})}; };
  expect_as_on_cpus(GetParam(), prepare, [](Rank&, Tensors& inputs) {
    const auto started = hvd::allreduce_async(inputs[0] * 3, {.op = hvd::Sum});
    const Place another(inputs[0].device());
    return Tensors{hvd::synchronize(started) + 1};
  });
}

TEST_P(GpuHorovod, ProcessSetsAndAdasumAreThoseOfCpus) {
  const auto prepare = [](int rank) { return Tensors{numbers_of(rank, {31}) + 0.25, numbers_of(rank, {4, 2})}; };
  expect_as_on_cpus(GetParam(), prepare, [](const Rank& rank, Tensors& inputs) {
    const auto two = hvd::add_process_set({0, 1});
    if (!two.included()) return Tensors{hvd::allreduce(inputs[1])};
    Tensors results{hvd::allreduce(inputs[0], {.op = hvd::Adasum, .process_set = two}),
                    hvd::allreduce(at::zeros_like(inputs[0]), {.op = hvd::Adasum, .process_set = two}),
                    hvd::allreduce(inputs[0].to(at::kFloat),
                                   {.op = hvd::Adasum, .compression = hvd::Compression::fp16, .process_set = two}),
                    hvd::allgather(inputs[1].narrow(0, 0, rank.number + 1), "", two)};
    results.push_back(hvd::allreduce(inputs[1]));
    return results;
  });
}

// A result's indices and values, for each rank has other numbers of entries.
TEST_P(GpuHorovod, SparseAllreducesAreThoseOfCpus) {
  const auto prepare = [](int rank) {
    return Tensors{at::arange(rank + 1).view({1, rank + 1}), numbers_of(rank, {rank + 1, 3})};
  };
  expect_as_on_cpus(GetParam(), prepare, [](Rank&, Tensors& inputs) {
    const auto mine = at::_sparse_coo_tensor_unsafe(inputs[0], inputs[1], {4, 3});
    Tensors results;
    for (const auto op : {hvd::Sum, hvd::Average}) {
      const auto sum = hvd::sparse_allreduce(mine, {.op = op, .postscale_factor = 2});
      results.insert(results.end(), {sum._indices(), sum._values()});
    }
    return results;
  });
}

TEST_P(GpuHorovod, GradientsOfOperationsAreThoseOfCpus) {
  const int ranks = GetParam();
  const auto prepare = [&](int rank) { return Tensors{numbers_of(rank, {2 * ranks, 3}), numbers_of(rank + 7, {3})}; };
  expect_as_on_cpus(ranks, prepare, [](Rank&, Tensors& inputs) {
    const auto x = inputs[0].requires_grad_();
    const auto sum = (hvd::allreduce(x) * inputs[1]).square().sum() + (hvd::allgather(x) * inputs[1]).pow(3).sum() +
                     (hvd::broadcast(x, 1) * inputs[1]).square().sum() +
                     (hvd::alltoall(x).output * inputs[1]).square().sum() +
                     (hvd::reducescatter(x, {.op = hvd::Sum}) * inputs[1]).pow(3).sum();
    sum.backward();
    return Tensors{x.grad()};
  });
}

struct Regression {
  explicit Regression(at::Device device) {
    net->to(at::kDouble);
    const at::NoGradGuard no_gradient;
    for (auto& parameter : net->parameters()) parameter.copy_(numbers_of(3, parameter.sizes()) / 9);
    net->to(device);
  }
  Tensor loss(const Tensor& data) { return (net(data.narrow(1, 0, 4)) - data.narrow(1, 4, 2)).square().mean(); }
  torch::nn::Linear net{4, 2};
};

// The first step compares the ranks' values, which the host reads.
void expect_optimizers_alike(int ranks, const hvd::DistributedOptimizerOptions& options, bool joins = false) {
  const auto prepare = [](int rank) {
    Tensors batches;
    for (int step = 0; step < kLoopSteps; ++step) batches.push_back(numbers_of(100 * step + rank, {5, 6}));
    return batches;
  };
  expect_as_on_cpus(ranks, prepare, [&](Rank& rank, Tensors& batches) {
    Regression model(rank.device);
    hvd::broadcast_parameters(*model.net, 0);
    torch::optim::Adam adam(model.net->parameters(), torch::optim::AdamOptions(0.05));
    hvd::DistributedOptimizer optimizer(adam, options);
    const auto steps = batches.size() - (joins ? static_cast<std::size_t>(2 * rank.number) : 0);
    for (std::size_t step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      for (int pass = 0; pass < options.backward_passes_per_step; ++pass) model.loss(batches[step]).backward();
      optimizer.step();
      if (step == 0) rank.read_no_more();
    }
    if (joins) {
      EXPECT_EQ(hvd::join(), 0);
      hvd::broadcast_parameters(*model.net, 0);
    }
    return model.net->parameters();
  });
}

TEST_P(GpuHorovod, DistributedOptimizersTrainAsOnCpus) {
  expect_optimizers_alike(GetParam(), {});
  expect_optimizers_alike(GetParam(), {.op = hvd::Sum});
  expect_optimizers_alike(GetParam(), {.backward_passes_per_step = 2});
}

TEST_P(GpuHorovod, RanksThatHaveJoinedTakePartOnTheirGpus) {
  expect_optimizers_alike(GetParam(), {}, /*joins=*/true);
  const auto prepare = [](int rank) { return Tensors{numbers_of(rank, {7})}; };
  expect_as_on_cpus(GetParam(), prepare, [](const Rank& rank, Tensors& inputs) {
    Tensors results{hvd::allreduce(inputs[0])};
    if (rank.number == 0) results.push_back(hvd::allreduce(inputs[0], {.op = hvd::Sum}) + 1);
    EXPECT_EQ(hvd::join(), 0);
    return results;
  });
}

// All tensors go through host memory if one rank's are elsewhere, or no rank's GPU is known.
TEST_P(GpuHorovod, RanksOnDifferentDevicesGoThroughHostMemory) {
  const int ranks = GetParam();
  const auto calls = simulated_nccl_calls();
  hvd::on_ranks(ranks, [&](int rank) {
    const auto device = rank == 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
    const Place place(device);
    const auto mine = hvd::values(rank, {ranks, 2}).to(device);
    const auto expect = [&](const Tensor& result, const Tensor& expected) {
      EXPECT_EQ(result.device(), device);
      hvd::expect_equal(result.cpu(), expected);
    };
    Tensors all;
    for (int r = 0; r < ranks; ++r) all.push_back(hvd::values(r, {ranks, 2}));
    expect(hvd::allreduce(mine, {.op = hvd::Sum}), at::stack(all).sum(0));
    expect(hvd::allgather(mine), at::cat(all));
    expect(hvd::broadcast(mine, ranks - 1), all.back());
    expect(hvd::alltoall(mine).output, at::stack(all).select(1, rank));
    expect(hvd::reducescatter(mine, {.op = hvd::Sum}), at::stack(all).sum(0).narrow(0, rank, 1));
    auto in_place = mine.clone();
    hvd::allreduce_(in_place);
    expect(in_place, at::stack(all).mean(0));
    // A Group has one GPU a rank: what is on another one goes through host memory as well.
    if (rank > 0) {
      const auto on_another = mine.to(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(ranks)));
      hvd::expect_equal(hvd::allreduce(on_another, {.op = hvd::Max}).cpu(), all.back());
    } else {
      hvd::expect_equal(hvd::allreduce(mine, {.op = hvd::Max}), all.back());
    }
  });
  EXPECT_EQ(simulated_nccl_calls(), calls);
}

TEST_P(GpuHorovod, ARankThatJoinedBeforeItUsedItsGpuTakesPart) {
  const int ranks = GetParam();
  hvd::on_ranks(ranks, [&](int rank) {
    if (rank == 0) {
      const auto mine = hvd::values(0).to(at::kCUDA);
      hvd::expect_equal(hvd::allreduce(mine, {.op = hvd::Sum}).cpu(), hvd::values(0));
    }
    EXPECT_EQ(hvd::join(), 0);
  });
}

TEST_P(GpuHorovod, TheStateOfRootsOptimizerComesToEachRanksGpu) {
  hvd::on_ranks(GetParam(), [](int rank) {
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
    const Place place(device);
    Regression model(device);
    torch::optim::Adam adam(model.net->parameters(), torch::optim::AdamOptions(rank == 0 ? 0.05 : 0.5));
    const auto data = numbers_of(1, {5, 6}).to(device);
    if (rank == 0) {
      model.loss(data).backward();
      adam.step();
    }
    hvd::broadcast_parameters(*model.net, 0);
    hvd::broadcast_optimizer_state(adam, 0);
    adam.zero_grad();
    model.loss(data).backward();
    adam.step();
    const auto weight = model.net->weight.detach();
    hvd::expect_equal(hvd::allreduce(weight, {.op = hvd::Max}).cpu(), weight.cpu());
    hvd::expect_equal(hvd::allreduce(weight, {.op = hvd::Min}).cpu(), weight.cpu());
  });
}

TEST_P(GpuHorovod, CallsThatDifferAreNamedAndTheNextIsGood) {
  hvd::on_ranks(GetParam(), [](int rank) {
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
    const Place place(device);
    expect_says(message_of<InvalidArgument>([&] { hvd::allreduce(hvd::values(rank, {2 + rank}).to(device)); }),
                "the ranks' calls differ: rank 0 calls allreduce (Average) of Double [2], rank 1 allreduce");
    hvd::expect_equal(hvd::allreduce(hvd::values(1).to(device)).cpu(), hvd::values(1));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuHorovod, testing::Values(2, 3));

}  // namespace
}  // namespace lockstep
