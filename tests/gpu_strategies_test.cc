// Strategies with a replica on each of several simulated GPUs: the values of as many replicas on CPUs. Gradients,
// values and the optimizer's state stay on the GPUs.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <barrier>
#include <limits>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "tests/simulated_gpu/cuda_runtime.h"
#include "tests/simulated_gpu/nccl.h"
#include "tests/workers.h"

namespace lockstep {
namespace {

constexpr double kLargestError = 1e-9;
constexpr int kLoopSteps = 9, kExamples = 7;

torch::nn::Sequential make_net(at::ScalarType dtype) {
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Linear(8, 8), torch::nn::Linear(8, 1));
  net->to(dtype);
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(5);
  for (auto& parameter : net->parameters()) parameter.copy_(at::randn(parameter.sizes(), generator, at::kDouble) * 0.4);
  return net;
}

Tensor examples(int step) {
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

 private:
  Strategy strategy_;
  Mirrored<torch::nn::Sequential> net_;
  ReplicatedOptimizer optimizer_;
  int first_ = 0;
};

Tensor trained_on_cpu(const Optimizer& optimizer) {
  Loop loop(OneDeviceStrategy("cpu:0", 1), optimizer);
  for (int step = 0; step < kLoopSteps; ++step) loop.step(examples(step));
  return loop.values();
}

void expect_all_are(Loop& loop, const Tensor& expected) {
  for (int replica = 0; replica < loop.replicas(); ++replica) {
    EXPECT_LT((loop.values(replica) - expected).abs().max().item<double>(), kLargestError);
    EXPECT_TRUE(at::equal(loop.values(replica), loop.values()));
  }
}

class GpuStrategies : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { simulated_gpu_delay(50); }
  void TearDown() override { simulated_gpu_delay(0); }

  static MirroredStrategy mirrored(CrossDeviceOps ops = CrossDeviceOps::automatic) {
    return MirroredStrategy({.devices = devices_for(GetParam()), .cross_device_ops = ops, .threads_per_replica = 1});
  }
};

std::vector<Optimizer> optimizers() {
  return {SGD({.learning_rate = 0.02, .momentum = 0.9}), Adam({.learning_rate = 0.01, .global_clipnorm = 0.3}),
          AdamW({.learning_rate = 0.01, .weight_decay = 0.1, .clipvalue = 0.02}),
          RMSprop({.learning_rate = 0.01, .clipnorm = 0.1})};
}

TEST_P(GpuStrategies, TrainAsOneCpuAndCopyNothingToTheHost) {
  for (const auto& optimizer : optimizers()) {
    SCOPED_TRACE(optimizer.rule().name());
    const auto expected = trained_on_cpu(optimizer);
    Loop loop(mirrored(), optimizer);
    loop.step(examples(0));
    const auto copies = simulated_gpu_copies_to_host();
    const auto calls = simulated_nccl_calls();
    for (int step = 1; step < kLoopSteps; ++step) loop.step(examples(step));
    EXPECT_EQ(simulated_gpu_copies_to_host(), copies);
    EXPECT_GT(simulated_nccl_calls(), calls);
    expect_all_are(loop, expected);
  }
}

TEST_P(GpuStrategies, HostMemoryIsUsedWhereItIsAskedFor) {
  const auto expected = trained_on_cpu(Adam());
  for (const auto ops : {CrossDeviceOps::one_pass, CrossDeviceOps::reduction_to_one_device,
                         CrossDeviceOps::hierarchical_copy_all_reduce}) {
    Loop loop(mirrored(ops), Adam());
    const auto calls = simulated_nccl_calls();
    for (int step = 0; step < kLoopSteps; ++step) loop.step(examples(step));
    EXPECT_EQ(simulated_nccl_calls(), calls);
    EXPECT_LT((loop.values() - expected).abs().max().item<double>(), kLargestError);
  }
}

TEST_P(GpuStrategies, AStepThatFailsOnOneReplicaChangesNothingAndTrainingGoesOn) {
  Loop loop(mirrored(CrossDeviceOps::nccl), Adam());
  Loop undisturbed(mirrored(CrossDeviceOps::nccl), Adam());
  for (int step = 0; step < kLoopSteps; ++step) {
    loop.step(examples(step));
    undisturbed.step(examples(step));
    if (step % 3 != 1) continue;
    const auto before = loop.values();
    expect_says(message_of([&] { loop.step(examples(step), 1, /*fails=*/true); }), "as asked for");
    EXPECT_TRUE(at::equal(loop.values(), before));
  }
  for (int replica = 0; replica < GetParam(); ++replica)
    EXPECT_TRUE(at::equal(loop.values(replica), undisturbed.values()));
}

TEST_P(GpuStrategies, AStepWhoseExceptionIsCaughtInsideIsToldAtTheNext) {
  Loop loop(mirrored(), Adam());
  loop.step(examples(0));
  loop.step(examples(1), 1, /*fails=*/false, /*catches=*/true);
  expect_says(message_of([&] { loop.step(examples(2)); }), "a step broke off on this replica");
  loop.step(examples(3));
}

TEST_P(GpuStrategies, GradientsThatAreNotFiniteChangeNothingButTheScale) {
  Loop loop(mirrored(), LossScaleOptimizer(Adam(), {.initial_scale = 64}));
  loop.step(examples(0));
  const auto before = loop.values();
  loop.step(examples(1), std::numeric_limits<double>::infinity());
  for (int replica = 0; replica < GetParam(); ++replica) EXPECT_TRUE(at::equal(loop.values(replica), before));
  EXPECT_EQ(loop.optimizer().iterations(), 1);
  EXPECT_EQ(loop.optimizer().loss_scale(), 32);
  loop.step(examples(2));
  EXPECT_FALSE(at::equal(loop.values(), before));
}

// Descends by half the gradient. The device rule throws on one GPU when it is told to.
struct HalfRule final : SpanRule<HalfRule> {
  std::string name() const override { return "half"; }
  std::vector<StateSpec> states() const override { return {}; }
  template <class T>
  void apply(const UpdateStep&, std::span<T> value, std::span<const T> gradient, std::span<T* const>) const {
    for (std::size_t i = 0; i < value.size(); ++i) value[i] -= gradient[i] / 2;
  }
};

struct HalfOnDevice final : DeviceRule {
  HalfOnDevice(at::Device its_device, const std::atomic<bool>& is_full) : device(its_device), full(is_full) {}
  std::vector<double> numbers(const UpdateStep&) const override { return {}; }
  void update(const DeviceParameters& all, const std::vector<Tensor>&) override {
    if (full && device.index() == 1) throw InvalidArgument("out of memory, as asked for");
    for (std::size_t i = 0; i < all.values.size(); ++i) all.values[i].sub_(all.gradients[i] / 2);
  }
  const at::Device device;
  const std::atomic<bool>& full;
};

TEST_P(GpuStrategies, AnUpdateThatBrokeOffOnOneGpuIsToldUntilAStateIsLoaded) {
  static std::atomic<bool> full = false;
  register_device_rule<HalfRule>([](const HalfRule&, const at::TensorOptions& options) {
    return std::make_unique<HalfOnDevice>(options.device(), full);
  });
  Loop loop(mirrored(), Optimizer(std::make_shared<HalfRule>(), {}));
  loop.step(examples(0));
  Archive archive;
  loop.state().save(archive, "optimizer");
  full = true;
  expect_says(message_of([&] { loop.step(examples(1)); }), "out of memory, as asked for");
  full = false;
  expect_says(message_of([&] { loop.step(examples(2)); }), "an earlier update broke off");
  expect_says(message_of([&] { loop.step(examples(2)); }), "load both from a checkpoint");
  loop.state().load(archive, "optimizer")();
  loop.step(examples(3));
}

TEST_P(GpuStrategies, SavedStateIsRestoredOnAllReplicasAndOnTheCpu) {
  Loop first(mirrored(), Adam()), again(mirrored(), Adam()), on_cpu(OneDeviceStrategy("cpu:0", 1), Adam());
  for (int step = 0; step < 4; ++step) first.step(examples(step));
  for (auto* const other : {&again, &on_cpu}) {
    for (int step = 0; step < 4; ++step) other->step(examples(step));  // the values
    for (int step = 0; step < 3; ++step) other->step(examples(10 + step));
  }
  Archive archive;
  first.state().save(archive, "optimizer");
  for (auto* const other : {&again, &on_cpu}) other->state().load(archive, "optimizer")();
  EXPECT_EQ(again.optimizer().iterations(), 4);
  again.step(examples(20));
  on_cpu.step(examples(20));
  for (int replica = 0; replica < GetParam(); ++replica)
    EXPECT_LT((again.values(replica) - on_cpu.values()).abs().max().item<double>(), kLargestError);
}

TEST_P(GpuStrategies, StepsReduceAndGatherTensorsOfTheirGpus) {
  const auto strategy = mirrored();
  const auto calls = simulated_nccl_calls();
  strategy.run([&](ReplicaContext& replica) {
    const auto device = at::Device(replica.device());
    const auto mine = at::full({2, 3}, replica.replica_id() + 1.0, device);
    const auto sum = replica.all_reduce(ReduceOp::sum, mine);
    const auto rows = replica.all_gather(mine.narrow(0, 0, 1), 0);
    EXPECT_EQ(sum.device(), device);
    EXPECT_EQ(sum[0][0].item<float>(), GetParam() * (GetParam() + 1) / 2.0F);
    EXPECT_EQ(rows.size(0), GetParam());
    EXPECT_EQ(rows[GetParam() - 1][0].item<float>(), static_cast<float>(GetParam()));
  });
  EXPECT_GT(simulated_nccl_calls(), calls);
}

// Two workers, each with as many GPUs.
TEST_P(GpuStrategies, WorkersTrainAsOneCpu) {
  const auto optimizer = Adam({.global_clipnorm = 0.3});
  const auto expected = trained_on_cpu(optimizer);
  const auto calls = simulated_nccl_calls();
  expect_no_errors(run_workers(
      {.workers = 2, .replicas = GetParam(), .communication = {.implementation = CommunicationImplementation::nccl}},
      [&](const auto& strategy) {
        Loop loop(strategy, optimizer);
        loop.take_rows_from(strategy.worker_rank() * GetParam());
        for (int step = 0; step < kLoopSteps; ++step) loop.step(examples(step));
        expect_all_are(loop, expected);
      }));
  EXPECT_GT(simulated_nccl_calls(), calls);
}

// Each GPU of all workers updates its own part of the parameters.
TEST_P(GpuStrategies, WorkersWhoseStateIsShardedTrainAsOneCpuAndCopyNothingToTheHost) {
  for (const auto& optimizer : optimizers()) {
    SCOPED_TRACE(optimizer.rule().name());
    const auto expected = trained_on_cpu(optimizer);
    const std::int64_t undivided = Loop(OneDeviceStrategy("cpu:0", 1), optimizer).optimizer().state_bytes();
    std::int64_t bytes_of_one = 0;
    for (const int workers : {1, 2}) {
      std::barrier together(workers);
      expect_no_errors(run_workers({.workers = workers, .replicas = GetParam(), .shard_optimizer_state = true},
                                   [&](const auto& strategy) {
                                     Loop loop(strategy, optimizer);
                                     loop.take_rows_from(strategy.worker_rank() * GetParam());
                                     loop.step(examples(0));
                                     together.arrive_and_wait();
                                     const auto copies = simulated_gpu_copies_to_host();
                                     together.arrive_and_wait();
                                     for (int step = 1; step < kLoopSteps; ++step) loop.step(examples(step));
                                     together.arrive_and_wait();
                                     EXPECT_EQ(simulated_gpu_copies_to_host(), copies);
                                     together.arrive_and_wait();
                                     expect_all_are(loop, expected);
                                     if (workers == 1) bytes_of_one = loop.optimizer().state_bytes();
                                     EXPECT_LT(loop.optimizer().state_bytes(), workers == 1 ? undivided : bytes_of_one);
                                   }));
    }
  }
}

TEST_P(GpuStrategies, AShardedStateIsRestoredByOtherNumbersOfWorkersAndOnTheCpu) {
  const auto optimizer = Adam({.learning_rate = 0.01, .global_clipnorm = 0.3});
  Archive archive;
  const auto run_and = [&](int workers, const std::function<void(const MultiWorkerMirroredStrategy&, Loop&)>& act) {
    expect_no_errors(run_workers({.workers = workers, .replicas = GetParam(), .shard_optimizer_state = true},
                                 [&](const auto& strategy) {
                                   Loop loop(strategy, optimizer);
                                   loop.take_rows_from(strategy.worker_rank() * GetParam());
                                   act(strategy, loop);
                                 }));
  };
  run_and(2, [&](const auto& strategy, Loop& loop) {
    for (int step = 0; step < 4; ++step) loop.step(examples(step));
    Archive mine;
    loop.state().save(mine, "optimizer");
    if (strategy.is_chief()) archive = mine;
  });
  const auto go_on = [&](Loop& loop) {
    for (int step = 0; step < 4; ++step) loop.step(examples(step));  // the values
    loop.step(examples(10));
    loop.step(examples(11));
    loop.state().load(archive, "optimizer")();
    EXPECT_EQ(loop.optimizer().iterations(), 4);
    loop.step(examples(20));
  };
  Loop on_cpu(OneDeviceStrategy("cpu:0", 1), optimizer);
  go_on(on_cpu);
  for (const int workers : {1, 2}) {
    run_and(workers, [&](const auto&, Loop& loop) {
      go_on(loop);
      expect_all_are(loop, on_cpu.values());
    });
  }
}

// float32, whose gradients are sent in 8 bits from GPU to GPU; and workers that train apart, in host memory or with one
// GPU each.
TEST_P(GpuStrategies, WorkersOverSlowLinksEndUpNearOneCpu) {
  const auto train = [&](std::optional<DType> dtype, std::optional<DiLoCoOptions> diloco, int workers = 2) {
    const int replicas = 2 * GetParam() / workers;
    Collected<Tensor> values;
    expect_no_errors(run_workers(
        {.workers = workers, .replicas = replicas, .communication = {.gradient_dtype = dtype}, .diloco = diloco},
        [&](const auto& strategy) {
          Loop loop(strategy, SGD({.learning_rate = 0.02}), at::kFloat);
          loop.take_rows_from(strategy.worker_rank() * replicas);
          for (int step = 0; step < kLoopSteps; ++step) loop.step(examples(step).to(at::kFloat));
          values.add(strategy, loop.values());
        }));
    EXPECT_TRUE(at::equal(values.values().at(1), values.chiefs()));
    return values.chiefs();
  };
  const auto exact = train({}, {});
  EXPECT_LT((train(DType::int8, {}) - exact).abs().max().item<double>(), 1e-2);
  EXPECT_LT((train({}, local_sgd(1)) - exact).abs().max().item<double>(), 1e-1);
  const auto calls = simulated_nccl_calls();
  EXPECT_LT((train({}, local_sgd(1), 2 * GetParam()) - exact).abs().max().item<double>(), 1e-1);
  EXPECT_GT(simulated_nccl_calls(), calls);
}

INSTANTIATE_TEST_SUITE_P(Replicas, GpuStrategies, testing::Values(2, 3));

TEST(GpuStrategiesBadInput, NcclIsForGpus) {
  const auto mixed = [] {
    MirroredStrategy({.devices = {"cuda:0", "cpu:0"}, .cross_device_ops = CrossDeviceOps::nccl});
  };
  expect_says(message_of<InvalidArgument>(mixed),
              "cross_device_ops: nccl sums gradients on GPUs, and the strategy's devices are cuda:0, cpu:0");
}

}  // namespace
}  // namespace lockstep
