// Loops of a user's own on simulated GPUs, a thread and a GPU for each rank: their results are those of one CPU.
// The host reads nothing in a step.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/ddp.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "base/expect_says_testing.h"
#include "base/text.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/ddp/sharded_optimizer.h"
#include "lockstep/ddp/sync_batch_norm.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "tests/host_reads.h"
#include "tests/on_gpus.h"
#include "tests/simulated_gpu/cuda_runtime.h"
#include "tests/simulated_gpu/nccl.h"

namespace lockstep {
namespace {

constexpr double kMostApart = 1e-9;
constexpr int kTrainingSteps = 10, kFeatures = 4;

Tensor random_of(int seed, at::IntArrayRef sizes) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return at::randn(sizes, generator, at::kDouble);
}

torch::nn::Sequential make_normalized_net() {
  torch::nn::Sequential net(torch::nn::Linear(kFeatures, 6), SyncBatchNorm(6), torch::nn::Linear(6, 6),
                            SyncBatchNorm(6), torch::nn::Linear(6, 1));
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  int seed = 50;
  for (auto& parameter : net->parameters()) parameter.copy_(random_of(seed++, parameter.sizes()));
  return net;
}

// Rank r of n gets rows [begins[r], begins[r + 1]) of each batch.
struct Rows {
  std::vector<std::int64_t> begins;
  Tensor of(const Tensor& batch, int rank) const {
    const auto index = static_cast<std::size_t>(rank);
    return batch.slice(0, begins[index], begins[index + 1]);
  }
};

Tensor loss_of(const Tensor& y, const Tensor& x) { return (y - x.sum(1, true).sin()).square().mean(); }

Tensor all_values_of(const torch::nn::Module& module) {
  std::vector<Tensor> all;
  for (const auto& parameter : module.parameters()) all.push_back(parameter.detach().cpu().flatten());
  for (const auto& buffer : module.buffers()) all.push_back(buffer.cpu().to(at::kDouble).flatten());
  return at::cat(all);
}

double apart(const Tensor& a, const Tensor& b) { return (a - b).abs().max().item<double>(); }

class GpuFrontEnds : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { simulated_gpu_delay(50); }
  void TearDown() override { simulated_gpu_delay(0); }

  static void on_gpus(const std::function<void(const Communicator&, at::Device)>& body) {
    const auto calls = simulated_nccl_calls();
    collective::on_ranks(GetParam(), [&](const Group& group) {
      const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(group.rank()));
      const c10::DeviceGuard guard(device);
      body(Communicator(group, 60), device);
    });
    EXPECT_GT(simulated_nccl_calls(), calls);
  }

  // Returns how often the host has read something while all ranks acted.
  static std::int64_t reads_while(const Communicator& ranks, const std::function<void()>& act) {
    return added_while(ranks, host_reads, act);
  }
};

TEST_P(GpuFrontEnds, SyncBatchNormIsThatOfOneCpuWithRaggedBatches) {
  const auto train = [](const auto& forward, const std::vector<Tensor>& parameters,
                        const std::vector<Tensor>& batches) {
    torch::optim::SGD sgd(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
    for (const auto& x : batches) {
      sgd.zero_grad();
      loss_of(forward(x), x).backward();
      sgd.step();
    }
  };
  std::vector<Tensor> batches;
  for (int step = 0; step < kTrainingSteps; ++step) batches.push_back(random_of(step, {9, kFeatures}));
  auto alone = make_normalized_net();
  train([&](const Tensor& x) { return alone->forward(x); }, alone->parameters(), batches);
  const auto expected = all_values_of(*alone);

  // In the second division the last rank has no example, and in the third one.
  const std::vector<Rows> divisions = GetParam() == 2
                                          ? std::vector<Rows>{{{0, 5, 9}}, {{0, 9, 9}}, {{0, 8, 9}}}
                                          : std::vector<Rows>{{{0, 2, 5, 9}}, {{0, 4, 9, 9}}, {{0, 3, 8, 9}}};
  for (const auto& rows : divisions) {
    SCOPED_TRACE(join(rows.begins));
    on_gpus([&](const Communicator& ranks, at::Device device) {
      auto net = make_normalized_net();
      net->to(device);
      convert_sync_batchnorm(*net, ranks.group());
      DistributedDataParallel ddp(net, ranks);
      std::vector<Tensor> mine;
      for (const auto& batch : batches) mine.push_back(rows.of(batch, ranks.rank()).to(device));
      const auto reads =
          reads_while(ranks, [&] { train([&](const Tensor& x) { return ddp(x); }, net->parameters(), mine); });
      // A rank with at most one example asks how many there are, in each layer. A rank without one asks which
      // parameters have a gradient.
      const auto fewest = rows.begins.back() - rows.begins[rows.begins.size() - 2];
      EXPECT_EQ(reads, fewest > 1 ? 0 : fewest == 1 ? 2 * kTrainingSteps : 3 * kTrainingSteps);
      EXPECT_LT(apart(all_values_of(*net), expected), kMostApart);
    });
  }
}

TEST_P(GpuFrontEnds, SyncBatchNormRefusesOneValuePerChannelOnAllRanks) {
  on_gpus([&](const Communicator& ranks, at::Device device) {
    SyncBatchNorm norm(3);
    norm->to(device);
    convert_sync_batchnorm(*norm, ranks.group());
    const auto x = at::ones({ranks.rank() == 0 ? 1 : 0, 3}, device);
    expect_says(message_of<InvalidArgument>([&] { norm(x); }), "more than one value per channel");
  });
}

TEST_P(GpuFrontEnds, ARankThatDoesNotKnowItsExamplesFailsTheLayersOfAll) {
  on_gpus([&](const Communicator& ranks, at::Device device) {
    torch::nn::Sequential net(torch::nn::Linear(3, 3), SyncBatchNorm(torch::nn::BatchNormOptions(3).affine(false)));
    net->to(device);
    convert_sync_batchnorm(*net, ranks.group());
    DistributedDataParallel ddp(net, ranks);
    const auto x = at::sin(at::arange(12, at::kFloat)).view({4, 3}).to(device);
    const auto loss = (ranks.rank() == 0 ? ddp(x) : net->forward(x)).square().sum();
    if (ranks.rank() > 0) {
      expect_says(message_of<InvalidArgument>([&] { loss.backward(); }),
                  "no forward that was called through ddp is in the graph of this backward");
      return ranks.abort("rank 0 waits no more");
    }
    EXPECT_ANY_THROW(loss.backward());
    expect_says(message_of([&] { net->forward(x); }), "another rank does not know the number of its examples");
  });
}

template <class Optimizer, class Options>
void expect_sharded_as_alone(int size, const Options& options) {
  const auto batch = [](int step) { return random_of(step, {12, kFeatures}); };
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(kFeatures, 7), torch::nn::Linear(7, 1));
    net->to(at::kDouble);
    const at::NoGradGuard no_grad;
    int seed = 80;
    for (auto& parameter : net->parameters()) parameter.copy_(random_of(seed++, parameter.sizes()));
    return net;
  };
  auto alone = make();
  Optimizer whole(alone->parameters(), options);
  for (int step = 0; step < kTrainingSteps; ++step) {
    whole.zero_grad();
    loss_of(alone->forward(batch(step)), batch(step)).backward();
    whole.step();
  }
  const auto expected = all_values_of(*alone);
  collective::on_ranks(size, [&](const Group& group) {
    const Communicator ranks(group, 60);
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(ranks.rank()));
    const c10::DeviceGuard guard(device);
    auto net = make();
    net->to(device);
    DistributedDataParallel ddp(net, ranks);
    ShardedOptimizer<Optimizer> optimizer(ddp, options);
    std::vector<Tensor> mine;
    for (int step = 0; step < kTrainingSteps; ++step) {
      mine.push_back(batch(step).tensor_split(ranks.size())[static_cast<std::size_t>(ranks.rank())].to(device));
    }
    group.barrier(ranks.deadline());
    const auto reads = host_reads();
    for (const auto& x : mine) {
      optimizer.zero_grad();
      loss_of(ddp(x), x).backward();
      optimizer.step();
    }
    group.barrier(ranks.deadline());
    EXPECT_EQ(host_reads(), reads);
    group.barrier(ranks.deadline());
    EXPECT_LT(apart(all_values_of(*net), expected), kMostApart);
    for (const auto& param_group : optimizer.local().param_groups()) {
      for (const auto& shard : param_group.params()) EXPECT_EQ(shard.device(), device);
    }
    const auto consolidated = optimizer.consolidate(0);
    EXPECT_EQ(consolidated != nullptr, ranks.rank() == 0);
    if (!consolidated) return;
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      auto& mine_of_root = *consolidated->state().at(net->parameters()[i].unsafeGetTensorImpl());
      auto& of_one_cpu = *whole.state().at(alone->parameters()[i].unsafeGetTensorImpl());
      using Shardable = internal::Shardable<Optimizer>;
      const auto gathered = Shardable::tensors(static_cast<typename Shardable::State&>(mine_of_root));
      const auto plain = Shardable::tensors(static_cast<typename Shardable::State&>(of_one_cpu));
      for (std::size_t k = 0; k < plain.size(); ++k) {
        EXPECT_EQ(gathered[k]->device(), device);
        EXPECT_LT(apart(gathered[k]->cpu(), *plain[k]), kMostApart);
      }
    }
    optimizer.load(*consolidated);
  });
}

TEST_P(GpuFrontEnds, ShardedOptimizersAreThoseOfOneCpu) {
  expect_sharded_as_alone<torch::optim::SGD>(GetParam(), torch::optim::SGDOptions(0.05).momentum(0.9));
  expect_sharded_as_alone<torch::optim::Adam>(GetParam(), torch::optim::AdamOptions(0.01).amsgrad(true));
}

TEST_P(GpuFrontEnds, ValuesGoFromGpuToGpu) {
  on_gpus([&](const Communicator& ranks, at::Device device) {
    const auto numbers = [&](int rank) { return at::arange(6, at::kDouble).view({2, 3}) + rank; };
    const std::vector<Tensor> values{numbers(ranks.rank()).to(device), numbers(ranks.rank()).t().to(device),
                                     numbers(ranks.rank()).to(at::kComplexFloat).to(device),
                                     numbers(ranks.rank()).gt(2).to(device)};
    EXPECT_EQ(reads_while(ranks, [&] { broadcast(ranks, values, 1); }), 0);
    EXPECT_TRUE(at::equal(values[0].cpu(), numbers(1)));
    EXPECT_TRUE(at::equal(values[1].cpu(), numbers(1).t()));
    EXPECT_TRUE(at::equal(values[2].cpu(), numbers(1).to(at::kComplexFloat)));
    EXPECT_TRUE(at::equal(values[3].cpu(), numbers(1).gt(2)));
  });
}

TEST_P(GpuFrontEnds, ValuesOnDifferentDevicesGoThroughHostMemory) {
  collective::on_ranks(GetParam(), [&](const Group& group) {
    const Communicator ranks(group, 60);
    const at::Device gpu(at::kCUDA, static_cast<c10::DeviceIndex>(ranks.rank()));
    const at::Device device = ranks.rank() == 0 ? at::Device(at::kCPU) : gpu;
    const std::vector<Tensor> values{at::full({3}, ranks.rank(), device), at::full({2}, 5 + ranks.rank(), gpu)};
    broadcast(ranks, values, 1);
    EXPECT_TRUE(at::equal(values[0].cpu(), at::full({3}, 1)));
    EXPECT_TRUE(at::equal(values[1].cpu(), at::full({2}, 6)));
    EXPECT_EQ(values[0].device(), device);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuFrontEnds, testing::Values(2, 3));

}  // namespace
}  // namespace lockstep
