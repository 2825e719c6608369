// TPUStrategy on the CPU plugin: its trainings are those of MirroredStrategy, whatever the number of devices, the batches
// and the model.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

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
  return {.optimizer = optimizer,
          .loss = SparseCategoricalCrossentropy({.from_logits = true}),
          .metrics = {"accuracy"}};
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
  return Sequential({Conv2D(8, 3, {.activation = "relu"}), MaxPooling2D(), Flatten(),
                     Dense(16, {.activation = "relu"}), Dense(10)});
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

INSTANTIATE_TEST_SUITE_P(Replicas, TpuReplicas, testing::Values(1, 2, 8));

}  // namespace
}  // namespace lockstep
