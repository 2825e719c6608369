// For tests: a program's own loop on simulated GPUs, or CPUs.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <string>
#include <utility>
#include <vector>

#include "base/expect_says_testing.h"
#include "tests/simulated_gpu/cuda_runtime.h"
#include "tests/simulated_gpu/nccl.h"
#include "tests/workers.h"

namespace lockstep {

inline constexpr double kLargestError = 1e-9;
inline constexpr int kLoopSteps = 9, kExamples = 7;

inline torch::nn::Sequential make_net(at::ScalarType dtype) {
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Linear(8, 8), torch::nn::Linear(8, 1));
  net->to(dtype);
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(5);
  for (auto& parameter : net->parameters()) parameter.copy_(at::randn(parameter.sizes(), generator, at::kDouble) * 0.4);
  return net;
}

inline Tensor examples(int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step));
  return at::randn({kExamples, 4}, generator, at::kDouble);
}

// A program's own loop: replica r of n takes rows r, r + n, ...
class Loop {
 public:
  Loop(Strategy strategy, const Optimizer& optimizer, at::ScalarType dtype = at::kDouble)
      : strategy_(std::move(strategy)),
        net_(strategy_.replicate([dtype] { return make_net(dtype); })),
        optimizer_(strategy_.optimizer(optimizer, net_)) {}

  // `factor`: of replica 0's loss. `fails`: replica 0 throws instead, while the others compute. `catches`: each
  // backward fails when it has most gradients, and the step function catches that.
  void step(const Tensor& x, double factor = 1, bool fails = false, bool catches = false) {
    const int parts = strategy_.num_replicas_in_sync();
    std::vector<Tensor> mine;  // on their devices before anything is counted
    for (std::size_t replica = 0; replica < strategy_.devices().size(); ++replica) {
      const auto name = strategy_.devices()[replica];
      const auto rows = at::arange(first_ + static_cast<int>(replica), x.size(0), parts);
      mine.push_back(x.index_select(0, rows).to(at::Device(name.starts_with("cuda") ? name : "cpu")));
    }
    strategy_.run(
        [&](ReplicaContext& replica, torch::nn::Sequential& net) {
          const bool is_first = replica.replica_id() == 0;
          if (fails && is_first) throw InvalidArgument("as asked for");
          const auto& part = mine[static_cast<std::size_t>(replica.local_replica_id())];
          const auto target = part.sum(1, true).sin();
          const auto loss = (net->forward(part) - target).square().sum() * (is_first ? factor : 1);
          if (!catches) return optimizer_.minimize(replica, loss, static_cast<double>(part.size(0)));
          auto first = net->parameters()[0];
          const auto hook = first.register_hook([](const Tensor&) -> Tensor { throw InvalidArgument("as asked for"); });
          EXPECT_ANY_THROW(optimizer_.minimize(replica, loss, 1));
          first.remove_hook(hook);
        },
        net_);
  }

  Loop& take_rows_from(int first) {
    first_ = first;
    return *this;
  }

  Tensor values(int replica = 0) {
    std::vector<Tensor> all;
    for (const auto& parameter : net_[replica]->parameters()) all.push_back(parameter.detach().cpu().flatten());
    return at::cat(all);
  }

  int replicas() const { return static_cast<int>(strategy_.devices().size()); }
  const ReplicatedOptimizer& optimizer() const { return optimizer_; }
  Trackable state() const { return optimizer_.trackable(); }
  Trackable net() const { return net_.trackable(); }

 private:
  Strategy strategy_;
  Mirrored<torch::nn::Sequential> net_;
  ReplicatedOptimizer optimizer_;
  int first_ = 0;
};

inline Tensor trained_on_cpu(const Optimizer& optimizer) {
  Loop loop(OneDeviceStrategy("cpu:0", 1), optimizer);
  for (int step = 0; step < kLoopSteps; ++step) loop.step(examples(step));
  return loop.values();
}

inline void expect_equal_copies(Loop& loop) {
  for (int replica = 0; replica < loop.replicas(); ++replica)
    EXPECT_TRUE(at::equal(loop.values(replica), loop.values()));
}

inline void expect_all_are(Loop& loop, const Tensor& expected) {
  EXPECT_LT((loop.values() - expected).abs().max().item<double>(), kLargestError);
  expect_equal_copies(loop);
}

class GpuStrategies : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { simulated_gpu_delay(50); }
  void TearDown() override { simulated_gpu_delay(0); }

  static MirroredStrategy mirrored(CrossDeviceOps ops = CrossDeviceOps::automatic) {
    return MirroredStrategy({.devices = devices_for(GetParam()), .cross_device_ops = ops, .threads_per_replica = 1});
  }
};

}  // namespace lockstep
