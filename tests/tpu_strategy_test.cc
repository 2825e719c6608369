// TPUStrategy on the CPU plugin: its trainings are those of MirroredStrategy, whatever the number of devices, the
// batches and the model.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <cstdlib>
#include <filesystem>

#include "base/expect_says_testing.h"
#include "benchmarks/models.h"
#include "gradient/replicated_parameters.h"
#include "strategy/strategy_impl.h"
#include "strategy/unwrap.h"

namespace lockstep {
namespace {

TPUStrategy tpu(int replicas) {
  return TPUStrategy(
      TPUClusterResolver("", {.plugin = CPU_PLUGIN, .plugin_options = {{"cpu_device_count", std::int64_t{replicas}}}}));
}

// 50 steps of batches of 24, the last of each epoch smaller: 8 replicas have parts of 3, then of 1 or none.
constexpr int kEpochs = 10;
Dataset images(std::int64_t channels, std::int64_t size) {
  at::manual_seed(4);
  return Dataset::from_tensor_slices(at::randn({101, channels, size, size}), at::randint(10, {101})).batch(24);
}

struct Result {
  std::vector<double> losses, accuracies;
  std::vector<Tensor> weights;
  Logs evaluated;
  Tensor predicted;
};

using MakeModel = std::function<Model()>;

Result train(const Strategy& strategy, const Dataset& data, const MakeModel& make, CompileOptions options) {
  set_random_seed(7);
  const auto scope = strategy.scope();
  auto model = make();
  model.compile(std::move(options));
  const auto history = model.fit(data, {.epochs = kEpochs, .verbose = 0}).history;
  Result result{history.at("loss"), history.at("accuracy")};
  const auto& parameters = unwrap(model.module());
  for (std::size_t i = 0; i < parameters.slots().size(); ++i)
    result.weights.push_back(parameters.parameter(0, i).detach().clone());
  for (std::size_t i = 0; i < parameters.buffer_names().size(); ++i)
    result.weights.push_back(parameters.average_buffer(i));
  result.evaluated = model.evaluate(data);
  result.predicted = model.predict(data);
  return result;
}

CompileOptions classifier(const Optimizer& optimizer = Adam()) {
  return {
      .optimizer = optimizer, .loss = SparseCategoricalCrossentropy({.from_logits = true}), .metrics = {"accuracy"}};
}

void expect_alike(const Result& a, const Result& b) {
  for (std::size_t i = 0; i < a.losses.size(); ++i) EXPECT_NEAR(a.losses[i], b.losses[i], 1e-5) << "epoch " << i;
  for (std::size_t i = 0; i < a.weights.size(); ++i)
    EXPECT_LT((a.weights[i].to(at::kFloat) - b.weights[i].to(at::kFloat)).abs().max().item<double>(), 1e-5) << i;
  EXPECT_EQ(a.accuracies, b.accuracies);
  EXPECT_NEAR(a.evaluated["loss"], b.evaluated["loss"], 1e-5);
  EXPECT_EQ(a.evaluated["accuracy"], b.evaluated["accuracy"]);
  EXPECT_LT((a.predicted - b.predicted).abs().max().item<double>(), 1e-4);
}

Model seed_cnn() {
  return Sequential(
      {Conv2D(8, 3, {.activation = "relu"}), MaxPooling2D(), Flatten(), Dense(16, {.activation = "relu"}), Dense(10)});
}

class TpuReplicas : public testing::TestWithParam<int> {};

TEST_P(TpuReplicas, TrainAsMirroredOnesDo) {
  const auto strategy = tpu(GetParam());
  const auto data = images(1, 12);
  const auto counts = unwrap(strategy).programs()->counts();
  expect_alike(train(strategy, data, seed_cnn, classifier()),
               train(MirroredStrategy(GetParam()), data, seed_cnn, classifier()));
  // The training step, the evaluation step and the prediction step.
  EXPECT_EQ(unwrap(strategy).programs()->counts().traced - counts.traced, 3);
  EXPECT_EQ(unwrap(strategy).programs()->counts().compiled - counts.compiled, 3);
}

// As examples/custom_module.cc, but for a bias that BatchNorm takes away again, so that its gradient is rounding alone,
// which Adam makes as large as any. Dropout draws other numbers than on other devices.
struct NormalizedImpl : torch::nn::Module {
  explicit NormalizedImpl(double dropped) : dropout(register_module("dropout", torch::nn::Dropout(dropped))) {}
  Tensor forward(const Tensor& x) { return output(dropout(torch::relu(norm(convolution(x))).flatten(1))); }
  torch::nn::Conv2d convolution =
      register_module("convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 6, 5).stride(2).bias(false)));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(6));
  torch::nn::Dropout dropout;
  torch::nn::Linear output = register_module("output", torch::nn::Linear(6 * 4 * 4, 10));
};
TORCH_MODULE(Normalized);

TEST_P(TpuReplicas, NormalizeBatchesAsMirroredOnesDo) {
  const auto options = [] {
    return classifier(AdamW({.learning_rate = CosineDecay(2e-3, 40), .global_clipnorm = 1.0}));
  };
  const auto make = [] { return Model([] { return Normalized(0.0); }); };
  const auto data = images(1, 12);
  expect_alike(train(tpu(GetParam()), data, make, options()),
               train(MirroredStrategy(GetParam()), data, make, options()));
}

// With batches that are no larger on any replica than the others: BatchNorm needs more than one value a channel.
TEST_P(TpuReplicas, TrainLayersWithBatchNormalization) {
  const auto make = [] {
    return Sequential(
        {Conv2D(4, 3, {.use_bias = false}), BatchNormalization(), Activation("relu"), Flatten(), Dense(10)});
  };
  const auto data = images(1, 8);
  expect_alike(
      train(tpu(GetParam()), data, make, classifier(SGD({.learning_rate = 0.05, .momentum = 0.9}))),
      train(MirroredStrategy(GetParam()), data, make, classifier(SGD({.learning_rate = 0.05, .momentum = 0.9}))));
}

TEST_P(TpuReplicas, TrainATransformer) {
  const auto make = [] { return Model([] { return std::make_shared<benchmarks::Transformer>(); }); };
  at::manual_seed(3);
  const auto data = Dataset::from_tensor_slices(at::randint(1000, {21, 64}, at::kLong), at::randint(10, {21})).batch(8);
  expect_alike(train(tpu(GetParam()), data, make, classifier(SGD({.learning_rate = 0.05}))),
               train(MirroredStrategy(GetParam()), data, make, classifier(SGD({.learning_rate = 0.05}))));
}

TEST_P(TpuReplicas, TrainAResNet) {
  const auto make = [] { return Model([] { return std::make_shared<benchmarks::ResNet18>(4); }); };
  at::manual_seed(4);
  const auto data = Dataset::from_tensor_slices(at::randn({160, 3, 16, 16}), at::randint(10, {160})).batch(32);
  const auto options = [] { return classifier(SGD({.learning_rate = 0.01})); };
  expect_alike(train(tpu(GetParam()), data, make, options()),
               train(MirroredStrategy(GetParam()), data, make, options()));
}

TEST(Tpu, StepsThatAreLaunchedTogetherAreThoseOneByOne) {
  const auto data = images(1, 12);
  const auto options = [](std::int64_t together) {
    auto all = classifier();
    all.steps_per_execution = together;
    return all;
  };
  const auto make = [] { return Model([] { return Normalized(0.3); }); };
  const auto strategy = tpu(2);
  const auto one_by_one = train(strategy, data, make, options(1));
  expect_alike(train(strategy, data, make, options(3)), one_by_one);  // of 5 steps an epoch
  const auto again = train(strategy, data, make, options(1));
  for (std::size_t i = 0; i < again.weights.size(); ++i)
    EXPECT_TRUE(at::equal(again.weights[i], one_by_one.weights[i]));
}

// A folder of compiled programs, and what a damaged file in it does.
TEST(Tpu, CompiledProgramsAreKeptOnDisk) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "tpu_cache";
  std::filesystem::remove_all(folder);
  setenv("LOCKSTEP_CACHE", folder.c_str(), 1);
  const auto data = images(1, 12);
  const auto compiled = [&] {
    const auto strategy = tpu(1);
    const auto result = train(strategy, data, seed_cnn, classifier());
    return std::pair(unwrap(strategy).programs()->counts().compiled, result);
  };
  const auto [first, expected] = compiled();
  EXPECT_EQ(first, 3);
  const auto [second, again] = compiled();
  EXPECT_EQ(second, 0);
  for (std::size_t i = 0; i < again.weights.size(); ++i) EXPECT_TRUE(at::equal(again.weights[i], expected.weights[i]));
  for (const auto& file : std::filesystem::directory_iterator(folder))
    std::filesystem::resize_file(file.path(), std::filesystem::file_size(file.path()) / 2);
  EXPECT_EQ(compiled().first, 3);
  EXPECT_EQ(compiled().first, 0);
  unsetenv("LOCKSTEP_CACHE");
}

TEST(Tpu, LabelsThatAreNoClassAreNamed) {
  const auto scope = tpu(2).scope();
  auto model = seed_cnn();
  model.compile(classifier());
  const auto data = Dataset::from_tensor_slices(at::randn({8, 1, 12, 12}), at::arange(8) + 3).batch(8);
  expect_says(message_of<InvalidArgument>([&] { model.fit(data, {.verbose = 0}); }),
              "a label is 10; the model has 10 outputs, so labels are 0 to 9");
}

TEST(Tpu, ComputesInSixteenBits) {
  set_global_policy("mixed_bfloat16");
  const auto data = images(1, 12);
  const auto half = train(tpu(2), data, seed_cnn, classifier());
  const auto of_cpu = train(MirroredStrategy(2), data, seed_cnn, classifier());
  set_global_policy("float32");
  const auto whole = train(tpu(2), data, seed_cnn, classifier());
  for (std::size_t i = 0; i < half.losses.size(); ++i) EXPECT_NEAR(half.losses[i], of_cpu.losses[i], 0.02) << i;
  EXPECT_EQ(half.predicted.scalar_type(), at::kFloat);
  EXPECT_GT((half.predicted - whole.predicted).abs().max().item<double>(), 1e-4);
}

TEST(Tpu, WhatIsNotThereIsNamed) {
  const auto error = [](const TPUClusterResolverOptions& options, int replicas) {
    return message_of<Error>([&] { TPUStrategy(TPUClusterResolver("", options), {.num_replicas = replicas}); });
  };
  const PluginOptions two{{"cpu_device_count", std::int64_t{2}}};
  expect_says(error({.plugin = CPU_PLUGIN, .plugin_options = two}, 3), "number of replicas is 3");
  expect_says(error({.plugin = CPU_PLUGIN, .plugin_options = two}, 3),
              "has 2 devices (cpu), so it must be from 1 to 2");
  expect_says(error({.plugin = "/nowhere/libtpu.so"}, 0), "there is no PJRT plugin /nowhere/libtpu.so");
  expect_says(message_of<InvalidArgument>([] { TPUClusterResolver("other-tpu"); }),
              "the TPU \"other-tpu\" is not this machine's");
  const auto topology =
      initialize_tpu_system(TPUClusterResolver("local", {.plugin = CPU_PLUGIN, .plugin_options = two}));
  EXPECT_EQ(topology.num_devices, 2);
  EXPECT_EQ(topology.kind, "cpu");
}

TEST(Tpu, CheckpointsGoFromStrategyToStrategy) {
  const auto data = images(1, 12);
  const auto path = testing::TempDir() + "tpu_checkpoint";
  const auto begin = [&](const Strategy& strategy, int epochs) {
    set_random_seed(7);
    const auto scope = strategy.scope();
    auto model = seed_cnn();
    model.compile(classifier());
    model.build({1, 12, 12});
    if (epochs > 0) model.fit(data, {.epochs = epochs, .verbose = 0});
    return model;
  };
  const auto whole = begin(MirroredStrategy(2), 4);
  const std::vector<Strategy> strategies{tpu(2), MirroredStrategy(2)};
  for (int first = 0; first < 2; ++first) {
    begin(strategies[first], 2).save_checkpoint(path);
    auto second = begin(strategies[1 - first], 0);
    second.load_checkpoint(path);
    second.fit(data, {.epochs = 4, .verbose = 0, .initial_epoch = 2});
    const auto &a = unwrap(whole.module()), &b = unwrap(second.module());
    for (std::size_t i = 0; i < a.slots().size(); ++i)
      EXPECT_LT((a.parameter(0, i) - b.parameter(0, i)).abs().max().item<double>(), 1e-5) << first << " " << i;
  }
}

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

TEST_P(TpuReplicas, RunLoopsOfTheProgramsOwn) {
  const auto strategy = tpu(GetParam());
  const auto expected = run_loop(MirroredStrategy(GetParam()), true);
  for (const bool once : {true, false}) {
    const auto counts = unwrap(strategy).programs()->counts();
    const auto loop = run_loop(strategy, once);
    for (std::size_t i = 0; i < loop.losses.size(); ++i) EXPECT_NEAR(loop.losses[i], expected.losses[i], 1e-4) << i;
    for (std::size_t i = 0; i < loop.weights.size(); ++i)
      EXPECT_LT((loop.weights[i] - expected.weights[i]).abs().max().item<double>(), 1e-5) << i;
    EXPECT_EQ(loop.running, expected.running);
    EXPECT_EQ(unwrap(strategy).programs()->counts().traced - counts.traced, once ? 1 : 50);
    EXPECT_LE(unwrap(strategy).programs()->counts().compiled - counts.compiled, 1);
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
  const PerReplica<Tensor> x({at::ones({2, 1, 12, 12}), at::ones({2, 1, 12, 12})});
  first.eval();
  second.eval();
  const auto expected = [&](Mirrored<Normalized>& net) {
    const at::NoGradGuard no_grad;
    return net[0](x[0]);
  };
  const auto counts = unwrap(strategy).programs()->counts();
  for (int round = 0; round < 2; ++round) {
    for (auto* const net : {&first, &second})
      EXPECT_LT((strategy.run(output, *net, x, 2.0)[1] - 2 * expected(*net)).abs().max().item<double>(), 1e-5);
    EXPECT_LT((strategy.run(output, first, x, 3.0)[0] - 3 * expected(first)).abs().max().item<double>(), 1e-5);
  }
  EXPECT_EQ(unwrap(strategy).programs()->counts().traced - counts.traced, 3);
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
  // And the strategy can be used again.
  const auto sums = strategy.run([](ReplicaContext&, const Tensor& own) { return own.sum(); }, x);
  EXPECT_EQ(sums[1].item<double>(), 6);
}

INSTANTIATE_TEST_SUITE_P(Replicas, TpuReplicas, testing::Values(1, 2, 8));

}  // namespace
}  // namespace lockstep
