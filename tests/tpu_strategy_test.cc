// TPUStrategy on the CPU plugin: its trainings are those of MirroredStrategy, whatever the number of devices, the
// batches and the model.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>

#include <cstdlib>
#include <filesystem>
#include <set>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "benchmarks/models.h"
#include "gradient/replicated_parameters.h"
#include "strategy/unwrap.h"
#include "tests/epoch_end.h"
#include "tests/tpu_testing.h"
#include "tpu/programs/programs.h"

namespace lockstep {
namespace {

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
  for (const auto& average : parameters.average_buffers()) result.weights.push_back(average);
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

TEST(Tpu, CallbacksSaveTheWeightsOfTheEpochsEnd) {
  for (const int replicas : {1, 2}) {
    SCOPED_TRACE(replicas);
    const auto folder = fresh_folder("tpu_strategy", text("epoch_end", replicas)).string();
    // The strategy's programs sum losses in float32.
    epoch_end::compare_epochs(tpu(replicas), folder, epoch_end::initial_line(folder), 1e-6);
  }
}

class TpuReplicas : public testing::TestWithParam<int> {};

TEST_P(TpuReplicas, TrainAsMirroredOnesDo) {
  const auto strategy = tpu(GetParam());
  const auto data = images(1, 12);
  const auto counts = programs::devices_of(unwrap(strategy)).counts();
  expect_alike(train(strategy, data, seed_cnn, classifier()),
               train(MirroredStrategy(GetParam()), data, seed_cnn, classifier()));
  // The training step, the evaluation step and the prediction step.
  EXPECT_EQ(programs::devices_of(unwrap(strategy)).counts().traced - counts.traced, 3);
  EXPECT_EQ(programs::devices_of(unwrap(strategy)).counts().compiled - counts.compiled, 3);
}

TEST_P(TpuReplicas, NormalizeBatchesAsMirroredOnesDo) {
  const auto options = [] {
    return classifier(AdamW({.learning_rate = CosineDecay(2e-3, 40), .global_clipnorm = 1.0}));
  };
  const auto make = [] { return Model([] { return Normalized(0.0); }); };
  const auto data = images(1, 12);
  expect_alike(train(tpu(GetParam()), data, make, options()),
               train(MirroredStrategy(GetParam()), data, make, options()));
}

// Batches are equally large on all replicas: BatchNorm needs more than one value a channel.
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
  const auto data = Dataset::from_tensor_slices(at::randint(1000, {37, 64}, at::kLong), at::randint(10, {37})).batch(8);
  expect_alike(train(tpu(GetParam()), data, make, classifier(SGD({.learning_rate = 0.05}))),
               train(MirroredStrategy(GetParam()), data, make, classifier(SGD({.learning_rate = 0.05}))));
}

// Trains in float64: rounding of float32 grows in a network as deep as this, with batches as small as these.
TEST_P(TpuReplicas, TrainAResNet) {
  const auto make = [] {
    return Model([] {
      auto net = std::make_shared<benchmarks::ResNet18>(4);
      net->to(at::kDouble);
      return net;
    });
  };
  at::manual_seed(4);
  const auto data =
      Dataset::from_tensor_slices(at::randn({160, 3, 16, 16}, at::kDouble), at::randint(10, {160})).batch(32);
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
    return std::pair(programs::devices_of(unwrap(strategy)).counts().compiled, result);
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

// Programs of another model under this one's names, and a folder that others may write in.
TEST(Tpu, ProgramsOfOthersAreNotRun) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "tpu_cache_of_others";
  std::filesystem::remove_all(folder);
  setenv("LOCKSTEP_CACHE", folder.c_str(), 1);
  const auto compiled = [&](double rate) {
    const auto strategy = tpu(1);
    auto options = classifier();
    options.optimizer = SGD({.learning_rate = rate});
    const auto result = train(strategy, images(1, 12), seed_cnn, options);
    return std::pair(programs::devices_of(unwrap(strategy)).counts().compiled, result);
  };
  const auto files = [&] {
    std::set<std::filesystem::path> all;
    for (const auto& file : std::filesystem::directory_iterator(folder)) all.insert(file.path());
    return all;
  };
  const auto [first, expected] = compiled(0.01);
  const auto of_first = files();
  for (const auto& file : of_first) {
    const auto archive = read_archive(file.string());
    for (const auto& other : of_first) {
      if (other != file) write_archive(other.string(), archive);
    }
  }
  const auto [again, result] = compiled(0.01);
  EXPECT_GE(again, first - 1);  // one of the names has its own program
  for (std::size_t i = 0; i < result.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(result.weights[i], expected.weights[i]));
  }
  std::filesystem::permissions(folder, std::filesystem::perms(0777));
  expect_says(message_of<InvalidArgument>([&] { compiled(0.01); }), "LOCKSTEP_CACHE");
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

TEST(Tpu, EpochsOfSomeStepsGoOnInTheSameData) {
  const auto data = images(1, 12).repeat();
  const auto losses = [&](const Strategy& strategy, std::int64_t together) {
    set_random_seed(7);
    const auto scope = strategy.scope();
    auto model = seed_cnn();
    auto options = classifier();
    options.steps_per_execution = together;
    model.compile(options);
    return model.fit(data, {.epochs = 4, .verbose = 0, .steps_per_epoch = 4}).history.at("loss");
  };
  const auto expected = losses(MirroredStrategy(2), 1);
  for (const int together : {1, 3}) {
    const auto found = losses(tpu(2), together);
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-5) << i;
  }
}

// A batch is read, and copied, while the devices compute the one before it.
TEST(Tpu, WhatIsWrongWithABatchIsSaidWhenItsTurnComes) {
  struct Count : Callback {
    void on_train_batch_end(std::int64_t, const Logs&) override { ++batches; }
    int batches = 0;
  };
  const auto scope = tpu(2).scope();
  auto model = seed_cnn();
  model.compile(classifier());
  auto labels = at::zeros({40}, at::kLong);
  labels[20] = 10;  // in the third batch
  const auto data = Dataset::from_tensor_slices(at::randn({40, 1, 12, 12}), labels).batch(8);
  const auto count = std::make_shared<Count>();
  expect_says(message_of<InvalidArgument>([&] { model.fit(data, {.verbose = 0, .callbacks = {count}}); }),
              "a label is 10");
  EXPECT_EQ(count->batches, 2);
  EXPECT_EQ(model.iterations(), 2);
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
  expect_says(error({.plugin = CPU_PLUGIN, .plugin_options = {{"cpu_device_count", std::string("two")}}}, 0),
              "the plugin does not take its options (cpu_device_count)");
  expect_says(error({.plugin = "/nowhere/libtpu.so"}, 0), "there is no PJRT plugin /nowhere/libtpu.so");
  expect_says(message_of<InvalidArgument>([] { TPUClusterResolver("other-tpu"); }),
              "the TPU \"other-tpu\" is not this machine's");
  const auto topology =
      initialize_tpu_system(TPUClusterResolver("local", {.plugin = CPU_PLUGIN, .plugin_options = two}));
  EXPECT_EQ(topology.num_devices, 2);
  EXPECT_EQ(topology.kind, "cpu");
}

TEST(Tpu, AnOptimizerWithRanksOfItsOwnIsRefused) {
  auto options = SGD().options();
  options.gradient_ranks = GradientRanks{.ranks = Communicator(make_thread_groups(1)[0], 60)};
  const auto scope = tpu(2).scope();
  auto model = seed_cnn();
  model.compile({.optimizer = Optimizer(SGD().shared_rule(), options),
                 .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  expect_says(message_of<InvalidArgument>([&] {
                model.build({1, 12, 12});
              }),
              "let TPUStrategy have the devices of all processes");
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

INSTANTIATE_TEST_SUITE_P(Replicas, TpuReplicas, testing::Values(1, 2, 8));

}  // namespace
}  // namespace lockstep
