// Loops of a program's own with TPUStrategy: steps that are traced, and compiled once.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>

#include "base/expect_says_testing.h"
#include "gradient/replicated_parameters.h"
#include "strategy/unwrap.h"
#include "tests/tpu_testing.h"
#include "tpu/programs/programs.h"

namespace lockstep {
namespace {

class TpuLoops : public testing::TestWithParam<int> {};

struct Loop {
  std::vector<double> losses;
  std::vector<Tensor> weights;
  double running = 0;
};

// A loop of the program's own, with a Variable, over batches that all replicas divide.
Loop run_loop(const Strategy& strategy, bool compiled_once) {
  set_random_seed(3);
  auto net = strategy.replicate([] { return Normalized(0.0); });
  const auto optimizer = strategy.optimizer(Adam(), net);
  const Variable seen(at::zeros({}),
                      {.synchronization = VariableSynchronization::on_read, .aggregation = VariableAggregation::sum},
                      strategy);
  const Variable mean(at::zeros({}), {.aggregation = VariableAggregation::mean}, strategy);
  at::manual_seed(4);
  const auto data =
      strategy.distribute(Dataset::from_tensor_slices(at::randn({80, 1, 12, 12}), at::randint(10, {80})).batch(16));
  const auto step = [&](ReplicaContext& replica, Normalized& own, const Example& part) {
    const auto losses = at::nll_loss(at::log_softmax(own(part.x), 1), part.y, {}, at::Reduction::Sum);
    optimizer.minimize(replica, losses, static_cast<double>(part.size()));
    seen.assign_add(replica, at::full({}, static_cast<double>(part.size())));
    mean.assign(replica, losses.detach());
    return std::pair(losses.detach(), replica.all_reduce(ReduceOp::max, losses.detach()));
  };
  const auto once = compiled(step);
  Loop loop;
  for (int epoch = 0; epoch < 10; ++epoch) {
    auto batches = data.iterate({.epoch = epoch});
    while (auto batch = batches.next()) {
      const auto results = compiled_once ? strategy.run(once, net, *batch) : strategy.run(step, net, *batch);
      double sum = 0, largest = 0;
      for (const auto& [loss, most] : results) {
        sum += loss.item<double>();
        largest = std::max(largest, loss.item<double>());
      }
      for (const auto& [loss, most] : results) EXPECT_EQ(most.item<double>(), largest);
      EXPECT_NEAR(mean.read().item<double>(), sum / strategy.num_replicas_in_sync(), 1e-4);
      loop.losses.push_back(sum);
    }
  }
  loop.running = seen.read().item<double>();
  EXPECT_EQ(optimizer.iterations(), 50);
  Archive archive;
  net.trackable().save(archive, "");
  optimizer.trackable().save(archive, "optimizer");
  const auto& parameters = unwrap(net);
  for (std::size_t i = 0; i < parameters.slots().size(); ++i)
    loop.weights.push_back(parameters.parameter(0, i).detach().clone());
  return loop;
}

TEST_P(TpuLoops, RunLoopsOfTheProgramsOwn) {
  const auto strategy = tpu(GetParam());
  const auto expected = run_loop(MirroredStrategy(GetParam()), true);
  for (const bool once : {true, false}) {
    const auto counts = programs::devices_of(unwrap(strategy)).counts();
    const auto loop = run_loop(strategy, once);
    for (std::size_t i = 0; i < loop.losses.size(); ++i) EXPECT_NEAR(loop.losses[i], expected.losses[i], 1e-4) << i;
    for (std::size_t i = 0; i < loop.weights.size(); ++i)
      EXPECT_LT((loop.weights[i] - expected.weights[i]).abs().max().item<double>(), 1e-5) << i;
    EXPECT_EQ(loop.running, expected.running);
    EXPECT_EQ(programs::devices_of(unwrap(strategy)).counts().traced - counts.traced, once ? 1 : 50);
    EXPECT_LE(programs::devices_of(unwrap(strategy)).counts().compiled - counts.compiled, 1);
  }
}

TEST(Tpu, ACompiledFunctionKnowsItsModulesTheirModeAndNumbers) {
  const auto strategy = tpu(2);
  set_random_seed(3);
  auto first = strategy.replicate([] { return Normalized(0.5); });
  auto second = strategy.replicate([] { return Normalized(0.5); });
  auto output = compiled([](ReplicaContext&, Normalized& own, const Tensor& x, double factor) {  // not const
    const at::NoGradGuard no_grad;
    return own(x) * factor;
  });
  at::manual_seed(4);
  const auto images = at::randn({2, 1, 12, 12});
  const PerReplica<Tensor> x({images, images});
  first.eval();
  second.eval();
  const auto expected = [&](Mirrored<Normalized>& net) {
    const at::NoGradGuard no_grad;
    return net[0](x[0]);
  };
  const auto counts = programs::devices_of(unwrap(strategy)).counts();
  for (int round = 0; round < 2; ++round) {
    for (auto* const net : {&first, &second})
      EXPECT_LT((strategy.run(output, *net, x, 2.0)[1] - 2 * expected(*net)).abs().max().item<double>(), 1e-5);
    EXPECT_LT((strategy.run(output, first, x, 3.0)[0] - 3 * expected(first)).abs().max().item<double>(), 1e-5);
  }
  EXPECT_EQ(programs::devices_of(unwrap(strategy)).counts().traced - counts.traced, 3);
  first.train();
  const auto dropped = strategy.run(output, first, x, 2.0);
  EXPECT_GT((dropped[0] - dropped[1]).abs().max().item<double>(), 1e-3);  // by masks of their own
}

// Code between backward and the update sees gradients, and a second update of the same step is another one.
Loop clipped_twice(const Strategy& strategy) {
  set_random_seed(3);
  auto net = strategy.replicate([] { return torch::nn::Linear(4, 3); });
  const auto optimizer = strategy.optimizer(Adam(), net);
  at::manual_seed(4);
  const auto x = at::randn({4, 4}) * 5;
  const PerReplica<Tensor> parts({x.slice(0, 0, 2), x.slice(0, 2, 4)});
  const auto step = compiled([&](ReplicaContext& replica, torch::nn::Linear& own, const Tensor& part) {
    for (int i = 0; i < 2; ++i) {
      own(part).square().sum().backward();
      for (auto& parameter : own->parameters()) parameter.mutable_grad().clamp_(-0.5, 0.5);
      optimizer.apply_gradients(replica, 2);
    }
    return own->weight.square().sum().detach();
  });
  Loop loop;
  for (int i = 0; i < 5; ++i) loop.losses.push_back(strategy.run(step, net, parts)[0].item<double>());
  EXPECT_EQ(optimizer.iterations(), 10);
  loop.weights.push_back(net[0]->weight.detach().clone());
  return loop;
}

TEST(Tpu, GradientsMayBeChangedBeforeTheUpdate) {
  const auto expected = clipped_twice(MirroredStrategy(2)), loop = clipped_twice(tpu(2));
  for (std::size_t i = 0; i < loop.losses.size(); ++i) EXPECT_NEAR(loop.losses[i], expected.losses[i], 1e-5) << i;
  EXPECT_LT((loop.weights[0] - expected.weights[0]).abs().max().item<double>(), 1e-5);
}

TEST(Tpu, WhatAStepCannotDoIsNamed) {
  const auto strategy = tpu(2);
  const auto message = [&](const auto& step, auto... arguments) {
    return message_of<Error>([&] { strategy.run(step, arguments...); });
  };
  const PerReplica<Tensor> x({at::ones({2, 3}), at::ones({2, 3})});
  expect_says(message([](ReplicaContext&, const Tensor& own) { return own.sum().item<double>(); }, x),
              "returns a value that is not made of tensors");
  expect_says(
      message([](ReplicaContext&, const Tensor& own) { return own.sum().item<double>() > 0 ? own : -own; }, x),
      "aten::_local_scalar_dense (operator 2 of the step, after aten::sum) cannot be compiled for a TPU: it reads a "
      "value of the step");
  expect_says(message([](ReplicaContext&, const Tensor& own) { return at::linalg_eigvals(own.mm(own.t())); }, x),
              "aten::linalg_eig (operator 3 of the step, after aten::mm) cannot be compiled for a TPU");
  expect_says(message([](ReplicaContext&, const Tensor& own) { return own.nonzero(); }, x), "fixed shapes");
  expect_says(message([](ReplicaContext& replica, const Tensor& own) { return own * replica.replica_id(); }, x),
              "one program for all replicas");
  expect_says(message([](ReplicaContext&, const Tensor& own) { return own; },
                      PerReplica<Tensor>({at::ones({2, 3}), at::ones({1, 3})})),
              "shape [2, 3] and dtype Float on replica 0 and shape [1, 3] and dtype Float on replica 1");
  const auto outside = at::ones({3});
  expect_says(message([&](ReplicaContext&, const Tensor& own) { return own + outside; }, x), "host memory");
  EXPECT_FALSE(strategy.run(
                           [](ReplicaContext&, const Tensor& own) {
                             return Example{own, own * 2};
                           },
                           x)[0]
                   .weight.defined());
  // The strategy can be used again.
  const auto sums = strategy.run([](ReplicaContext&, const Tensor& own) { return own.sum(); }, x);
  EXPECT_EQ(sums[1].item<double>(), 6);
}

INSTANTIATE_TEST_SUITE_P(Replicas, TpuLoops, testing::Values(1, 2, 8));

}  // namespace
}  // namespace lockstep
