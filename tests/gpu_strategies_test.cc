// Strategies with a replica on each of several simulated GPUs: the values of as many replicas on CPUs. Gradients,
// values and the optimizer's state stay on the GPUs.
#include <barrier>
#include <limits>

#include "tests/gpu_loop.h"

namespace lockstep {
namespace {

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
