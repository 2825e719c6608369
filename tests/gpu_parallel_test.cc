// Models that are split over simulated GPUs: the values of as many ranks on CPUs, in double precision. Within a step no
// tensor goes through host memory.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/parallel.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>

#include <mutex>

#include "parallel/transformer_testing.h"
#include "tests/on_gpus.h"

namespace lockstep {
namespace {

using parallel::make_batch;
using parallel::make_transformer;
using parallel::TransformerOptions;

constexpr int kParallelSteps = 6;
const TransformerOptions kSmall{.layers = 2, .width = 8, .head = 2, .sequence = 6, .classes = 24};

// Multiplies elements: CPUs and simulated GPUs round such products alike in 16 bits too.
struct ScaleImpl : torch::nn::Module {
  ScaleImpl()
      : weight(register_parameter("weight", torch::zeros({7}))), bias(register_parameter("bias", torch::zeros({7}))) {}
  Tensor forward(const Tensor& x) { return x * weight + bias; }
  Tensor weight, bias;
};
TORCH_MODULE(Scale);

// Sizes that no number of ranks divides. In double precision it has 7 inputs, 5 and 3 outputs.
torch::nn::Sequential ragged_net(at::ScalarType dtype, at::Device device) {
  torch::nn::Sequential linear(torch::nn::Linear(7, 5), torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})),
                               torch::nn::Linear(5, 5), torch::nn::Linear(5, 3));
  auto net = dtype == at::kDouble ? linear : torch::nn::Sequential(Scale(), Scale(), Scale());
  const at::NoGradGuard no_gradient;
  double phase = 0;
  for (auto& parameter : net->parameters())
    parameter.copy_(at::sin(at::arange(parameter.numel(), at::kDouble) * 1.3 + phase++).view(parameter.sizes()) / 2);
  net->to(device, dtype);
  return net;
}

struct Sharding {
  int ranks;
  FullyShardOptions options = {};
  int replicas = 1;
  int backwards = 1;  // in a step
  bool freezes = false;
  at::ScalarType dtype = at::kDouble;
};

Values train_sharded(const Sharding& sharding, const Communicator& ranks, at::Device device) {
  const int shards = ranks.size() / sharding.replicas;
  const DeviceMesh mesh({{"data", sharding.replicas}, {"shard", shards}}, ranks);
  auto net = ragged_net(sharding.dtype, device);
  if (sharding.freezes) net[0]->as<torch::nn::Linear>()->bias.set_requires_grad(false);
  auto options = sharding.options;
  options.units = {"0", "2"};
  if (sharding.replicas > 1) options.replicas = mesh["data"];
  auto sharded = fully_shard(net, mesh["shard"], options);
  torch::optim::AdamW adamw(sharded.parameters(), torch::optim::AdamWOptions(1e-2));
  const auto input_dtype = options.param_dtype ? at::kBFloat16 : sharding.dtype;
  std::vector<Tensor> batches;
  for (int i = 0; i < kParallelSteps * sharding.backwards; ++i) {
    const auto x = at::sin(at::arange(9 * 7, at::kDouble).view({9, 7}) + i);
    batches.push_back(x.tensor_split(ranks.size())[static_cast<std::size_t>(ranks.rank())].to(device, input_dtype));
  }
  std::size_t next = 0;
  const auto step = [&] {
    adamw.zero_grad();
    for (int i = 0; i < sharding.backwards; ++i) {
      const auto& x = batches[next++];
      const auto y = sharded(x);
      (y - x.slice(1, 0, y.size(1))).to(sharding.dtype).pow(2).mean().backward();
    }
    adamw.step();
  };
  step();
  const bool reaches =
      !device.is_cuda() || ranks.group().reaches({MemoryDevice::Type::cuda, device.index()}, ranks.deadline());
  const bool goes_to_host = !reaches || (options.cpu_offload && device.is_cuda());
  if (goes_to_host) {
    for (int i = 1; i < kParallelSteps; ++i) step();
  } else {
    expect_copies(ranks, 0, [&] {
      for (int i = 1; i < kParallelSteps; ++i) step();
    });
  }
  auto values = sharded.gather();
  std::map<std::string, Tensor> others;  // which load sets on all ranks
  for (const auto& [name, value] : values) others[name] = value + 1;
  sharded.load(others);
  for (const auto& [name, value] : sharded.gather()) EXPECT_TRUE(at::equal(value, others.at(name)));
  return values;
}

TEST_F(ParallelOnGpus, FullyShardTrainsAsOnCpus) {
  FullyShardOptions prefetching, stage_2, offloading;
  prefetching.prefetch = offloading.cpu_offload = true;
  stage_2.reshard_after_forward = false;
  for (const auto& sharding :
       {Sharding{.ranks = 2}, Sharding{.ranks = 3}, Sharding{.ranks = 3, .options = prefetching},
        Sharding{.ranks = 2, .options = stage_2}, Sharding{.ranks = 2, .options = offloading},
        Sharding{.ranks = 4, .options = prefetching, .replicas = 2}, Sharding{.ranks = 2, .backwards = 3},
        Sharding{.ranks = 3, .options = prefetching, .backwards = 2, .freezes = true}}) {
    SCOPED_TRACE(testing::Message() << sharding.ranks << " ranks, " << sharding.replicas << " replicas, prefetch "
                                    << sharding.options.prefetch << ", " << sharding.backwards << " backwards");
    expect_as_on_cpus(sharding.ranks, [&](const Communicator& ranks, at::Device device) {
      return train_sharded(sharding, ranks, device);
    });
  }
}

TEST_F(ParallelOnGpus, FullyShardGoesThroughHostMemoryWhereItMust) {
  expect_through_host(3, [&](const Communicator& ranks, at::Device device) {
    return train_sharded({.ranks = 3, .options = {.prefetch = true}}, ranks, device);
  });
}

TEST_F(ParallelOnGpus, FullyShardIn16BitsTrainsAsOnCpus) {
  FullyShardOptions options;
  options.param_dtype = DType::bfloat16;
  options.reduce_dtype = DType::float32;
  for (const bool prefetches : {false, true}) {
    options.prefetch = prefetches;
    expect_as_on_cpus(2, [&](const Communicator& ranks, at::Device device) {
      return train_sharded({.ranks = 2, .options = options, .dtype = at::kFloat}, ranks, device);
    });
  }
}

TEST_F(ParallelOnGpus, FullyShardGoesOnAfterABackwardThatFailed) {
  FullyShardOptions options{.units = {"0", "2"}, .prefetch = true};
  expect_as_on_cpus(2, [&](const Communicator& ranks, at::Device device) {
    auto net = ragged_net(at::kDouble, device);
    auto sharded = fully_shard(net, ranks, options);
    torch::optim::AdamW adamw(sharded.parameters(), torch::optim::AdamWOptions(1e-2));
    const auto x = at::cos(at::arange(21, at::kDouble).view({3, 7}) + ranks.rank()).to(device);
    for (int step = 0; step < kParallelSteps; ++step) {
      adamw.zero_grad();
      auto y = sharded(x);
      if (step == 3) {
        auto hidden = x.clone().requires_grad_();
        hidden.register_hook([](const Tensor&) -> Tensor { throw InvalidArgument("as asked for"); });
        EXPECT_ANY_THROW(sharded(hidden).sum().backward());
        sharded.release();
        y = sharded(x);
        adamw.zero_grad();
      }
      y.pow(2).mean().backward();
      adamw.step();
    }
    return sharded.gather();
  });
}

TEST_F(ParallelOnGpus, GradientsAreAveragedAndClippedAsOnCpus) {
  for (const int size : {2, 3}) {
    expect_as_on_cpus(size, [&](const Communicator& ranks, at::Device device) {
      auto net = ragged_net(at::kDouble, device);
      const auto x = at::sin(at::arange(28, at::kDouble).view({4, 7}) + ranks.rank()).to(device);
      double norm = 0;
      const auto step = [&] {
        net->zero_grad();
        net->forward(x).pow(2).mean().backward();
        average_gradients(net->parameters(), ranks, ranks.rank() + 1);
        norm = clip_grad_norm(net->parameters(), 0.1);
      };
      step();
      expect_copies(ranks, 0, step);
      Values values{{"norm", at::scalar_tensor(norm, at::kDouble)}};
      for (const auto& each : net->named_parameters()) values[each.key()] = each.value().grad();
      return values;
    });
  }
}

TEST_F(ParallelOnGpus, RingAttentionIsThatOfCpus) {
  for (const int size : {2, 3}) {
    for (const bool is_causal : {false, true}) {
      expect_as_on_cpus(size, [&](const Communicator& ranks, at::Device device) {
        std::vector<Tensor> mine;
        for (int i = 0; i < 3; ++i) {
          const auto whole = at::sin(at::arange(2 * 3 * 12 * 5, at::kDouble).view({2, 3, 12, 5}) * (1.1 + i));
          const auto part = whole.chunk(size, 2)[static_cast<std::size_t>(ranks.rank())];
          mine.push_back(part.to(device).clone().requires_grad_());
        }
        Tensor y;
        const auto attend = [&] {
          y = ring_attention(mine[0], mine[1], mine[2], ranks, {.is_causal = is_causal});
          y.pow(3).sum().backward();
        };
        attend();
        expect_copies(ranks, 0, attend);
        const auto of_rank = std::to_string(ranks.rank());
        return Values{{"y" + of_rank, y},
                      {"query" + of_rank, mine[0].grad()},
                      {"key" + of_rank, mine[1].grad()},
                      {"value" + of_rank, mine[2].grad()}};
      });
    }
  }
}

// The host reads one thing a step: whether labels and logits are what they must be.
TEST_F(ParallelOnGpus, DividedLayersTrainAsOnCpus) {
  const ParallelPlan plan{{"*.token", RowwiseParallel()}, {"*.qkv", ColwiseParallel()},  {"*.out", RowwiseParallel()},
                          {"*.up", ColwiseParallel()},    {"*.down", RowwiseParallel()}, {"*.head", ColwiseParallel()}};
  for (const int size : {2, 4}) {
    expect_as_on_cpus(size, [&](const Communicator& ranks, at::Device device) {
      auto net = make_transformer({.layers = 2, .width = 8, .head = 2, .sequence = 6, .classes = 24});
      net->to(device);
      parallelize_module(net, ranks, plan);
      torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(1e-2));
      std::vector<parallel::Batch> batches;
      for (int i = 0; i < kParallelSteps; ++i) {
        const auto batch = make_batch(i, 3, kSmall);
        batches.push_back({batch.ids.to(device), batch.labels.to(device)});
      }
      const auto step = [&](const parallel::Batch& batch) {
        adamw.zero_grad();
        vocabulary_parallel_cross_entropy(net(batch.ids), batch.labels, ranks).mean().backward();
        adamw.step();
      };
      for (int i = 0; i < 3; ++i) step(batches[static_cast<std::size_t>(i)]);
      expect_copies(ranks, device.is_cuda() ? ranks.size() : 0, [&] { step(batches[4]); });
      return whole_parameters(*net);
    });
  }
}

// The host reads once a forward how many tokens go where.
TEST_F(ParallelOnGpus, ExpertsTrainAsOnCpus) {
  for (const auto& moe_options : {MoEOptions{.experts = 6, .top_k = 1}, MoEOptions{.experts = 6, .top_k = 2},
                                  MoEOptions{.experts = 6, .top_k = 2, .capacity_factor = 1}}) {
    for (const int size : {2, 3}) {
      expect_as_on_cpus(size, [&](const Communicator& ranks, at::Device device) {
        static std::mutex making;
        const auto make = [&] {
          const std::lock_guard lock(making);
          torch::manual_seed(2);
          return MoE(
              moe_options, parallel::kExpertWidth, [] { return parallel::Expert(); }, ranks);
        };
        auto moe = make();
        moe->to(device, at::kDouble);
        torch::optim::AdamW adamw(moe->parameters(), torch::optim::AdamWOptions(1e-2));
        const auto tokens = at::sin(at::arange(24 * parallel::kExpertWidth, at::kDouble).view({4, 6, -1}) * 1.7);
        const auto x = tokens.tensor_split(size)[static_cast<std::size_t>(ranks.rank())].to(device);
        const auto step = [&] {
          adamw.zero_grad();
          const auto y = moe(x);
          ((y - x.flip(-1)).pow(2).mean() + 0.01 * moe->balance_loss()).backward();
          average_gradients(moe->parameters(), ranks, 1);
          adamw.step();
        };
        for (int i = 0; i < 4; ++i) step();
        expect_copies(ranks, device.is_cuda() ? ranks.size() : 0, step);
        EXPECT_EQ(moe->dropped() > 0, moe_options.capacity_factor > 0);
        return Values(parallel::parameters_of(*moe));
      });
    }
  }
}

}  // namespace
}  // namespace lockstep
