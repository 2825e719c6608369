// fit, evaluate and predict compute the results of a plain loop, or refuse to.
#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <map>
#include <numeric>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "data/stored_tensor.h"
#include "tests/workers.h"

namespace lockstep {
namespace {

Tensor saved(const Model& model, const std::string& name) {
  const auto path = fresh_folder("fit_results", "saved").string() + "/weights";
  model.save_weights(path);
  return data::from_stored(read_archive(path).tensor(name));
}

// --- running statistics

// Each replica's running mean of its parts, and the mean of these means by the examples that each has seen.
struct RunningMeans {
  RunningMeans(std::size_t replicas, double momentum) : means(replicas), seen(replicas), keep(momentum) {}
  void see(std::size_t replica, const Tensor& part) {
    if (part.size(0) == 0) return;
    const auto before = means[replica].defined() ? means[replica] : at::zeros({part.size(1)}, at::kDouble);
    means[replica] = keep * before + (1 - keep) * part.mean(0);
    seen[replica] += static_cast<double>(part.size(0));
  }
  Tensor mean() const {
    auto sum = at::zeros_like(means[0]);
    for (std::size_t i = 0; i < means.size(); ++i)
      if (means[i].defined()) sum += means[i] * seen[i];
    return sum / std::accumulate(seen.begin(), seen.end(), 0.0);
  }
  std::vector<Tensor> means;
  std::vector<double> seen;
  double keep;
};

TEST(RunningStatistics, CountReplicasByTheExamplesThatTheyHaveSeen) {
  constexpr int kCount = 14, kBatch = 3, kEpochs = 2;  // the last batch has 2
  const auto x = waves(kCount, 4);
  for (const int replicas : {1, 2, 4, 5}) {
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    Sequential model({BatchNormalization({.momentum = 0.9}), Dense(1)});
    model.compile({.optimizer = SGD({.learning_rate = 0}), .loss = "mse"});
    model.fit(Dataset::from_tensor_slices(x, x.sum(1, true)).batch(kBatch), {.epochs = kEpochs, .verbose = 0});
    RunningMeans expected(static_cast<std::size_t>(replicas), 0.9);
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      for (int begin = 0; begin < kCount; begin += kBatch) {
        const auto parts = x.slice(0, begin, begin + kBatch).tensor_split(replicas);
        for (std::size_t i = 0; i < parts.size(); ++i) expected.see(i, parts[i]);
      }
    }
    const auto found = saved(model, "batch_normalization.running_mean");
    EXPECT_LT((found - expected.mean()).abs().max().item<double>(), 1e-12) << replicas << " replicas";
    // predict uses the statistics that save_weights saves.
    const auto outputs = model.predict(Dataset::from_tensor_slices(x).batch(kBatch));
    const auto copy = fresh_folder("fit_results", "statistics").string() + "/weights";
    model.save_weights(copy);
    const auto alone = OneDeviceStrategy("cpu:0").scope();
    Sequential same({BatchNormalization({.momentum = 0.9}), Dense(1)});
    same.build({4}, at::kDouble);
    same.load_weights(copy);
    const auto expected_outputs = same.predict(Dataset::from_tensor_slices(x).batch(kCount));
    EXPECT_LT((outputs - expected_outputs).abs().max().item<double>(), 1e-12) << replicas << " replicas";
  }
}

struct CountingImpl : torch::nn::Module {
  CountingImpl() {
    linear = register_module("linear", torch::nn::Linear(4, 1));
    batches = register_buffer("batches", at::zeros({}, at::kLong));
    fixed = register_buffer("fixed", at::full({2}, -3.5));
    flags = register_buffer("flags", at::tensor({1, 0}).to(at::kBool));
  }
  Tensor forward(const Tensor& x) {
    if (is_training()) batches.add_(1);
    return linear(x);
  }
  torch::nn::Linear linear = nullptr;
  Tensor batches, fixed, flags;
};

// torch's num_batches_tracked is such a buffer: a step counts once, and a replica without examples counts none.
TEST(RunningStatistics, OtherBuffersAreThoseOfTheReplicaThatHasSeenMost) {
  const auto x = waves(5, 4).to(at::kFloat);  // batches of 2, 2 and 1
  const MirroredStrategy strategy(4);
  const auto scope = strategy.scope();
  Model model([] { return std::make_shared<CountingImpl>(); });
  model.compile({.optimizer = SGD({.learning_rate = 0}), .loss = "mse"});
  model.fit(Dataset::from_tensor_slices(x, x.sum(1, true)).batch(2), {.epochs = 3, .verbose = 0});
  EXPECT_EQ(saved(model, "batches").item<std::int64_t>(), 9);
  EXPECT_TRUE(at::equal(saved(model, "fixed"), at::full({2}, -3.5)));
  EXPECT_TRUE(at::equal(saved(model, "flags"), at::tensor({1, 0}).to(at::kBool)));
}

TEST(RunningStatistics, GoOnFromACheckpointWithTheSameWeights) {
  const auto x = waves(14, 4);
  const auto data = Dataset::from_tensor_slices(x, x.sum(1, true)).batch(3);
  const MirroredStrategy strategy(4);
  const auto scope = strategy.scope();
  const auto make = [] {
    set_random_seed(4);
    Sequential model({BatchNormalization({.momentum = 0.9}), Dense(1)});
    model.compile({.optimizer = SGD({.learning_rate = 0.01}), .loss = "mse"});
    model.build({4}, at::kDouble);
    return model;
  };
  const auto path = fresh_folder("fit_results", "goes_on").string() + "/full";
  auto whole = make(), half = make(), other = make();
  whole.fit(data, {.epochs = 4, .verbose = 0});
  half.fit(data, {.epochs = 2, .verbose = 0});
  half.save_checkpoint(path);
  other.load_checkpoint(path);
  other.fit(data, {.epochs = 4, .verbose = 0, .initial_epoch = 2});
  for (const char* name : {"batch_normalization.running_mean", "batch_normalization.running_var"})
    EXPECT_TRUE(at::equal(saved(whole, name), saved(other, name))) << name;
}

TEST(RunningStatistics, CountWorkersByTheExamplesInTheirFiles) {
  const auto x = waves(16, 4);
  const auto read = [&](const std::string& path) {
    const auto mine = path == "0" ? x.slice(0, 0, 12) : x.slice(0, 12);
    return Dataset::from_tensor_slices(mine, mine.sum(1, true));
  };
  RunningMeans expected(2, 0.9);
  for (int begin = 0; begin < 16; begin += 2) expected.see(begin < 12 ? 0 : 1, x.slice(0, begin, begin + 2));
  const auto path = fresh_folder("fit_results", "files").string() + "/weights";
  expect_no_errors(run_workers({.workers = 2}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    Sequential model({BatchNormalization({.momentum = 0.9}), Dense(1)});
    model.compile({.optimizer = SGD({.learning_rate = 0}), .loss = "mse"});
    model.fit(Dataset::from_files({"0", "1"}, read).batch(4), {.verbose = 0});
    model.save_weights(path);
  }));
  const auto found = data::from_stored(read_archive(path).tensor("batch_normalization.running_mean"));
  EXPECT_LT((found - expected.mean()).abs().max().item<double>(), 1e-12);
}

TEST(RunningStatistics, AreOfFeaturesOverBatchAndTime) {
  const auto x = waves(6, 5 * 3).view({6, 5, 3});
  const OneDeviceStrategy strategy("cpu:0");
  const auto scope = strategy.scope();
  const auto outputs_of = [&](BatchNormalizationOptions options) {
    Sequential model({BatchNormalization(options)});
    model.build({5, 3}, at::kDouble);
    return unwrap(model.module()).module(0).named_buffers()["batch_normalization.running_mean"].numel();
  };
  EXPECT_EQ(outputs_of({}), 3);
  EXPECT_EQ(outputs_of({.axis = 1}), 5);
  expect_says(message_of<InvalidArgument>([&] { outputs_of({.axis = 0}); }), "axis is 0");
  Sequential model({BatchNormalization({.momentum = 0}), Dense(1)});
  model.compile({.optimizer = SGD({.learning_rate = 0}), .loss = "mse"});
  model.fit(Dataset::from_tensor_slices(x, x.sum(2, true)).batch(6), {.verbose = 0});
  EXPECT_TRUE(at::allclose(saved(model, "batch_normalization.running_mean"), x.flatten(0, 1).mean(0)));
  EXPECT_TRUE(
      at::allclose(saved(model, "batch_normalization.running_var"), x.flatten(0, 1).var(0, /*unbiased=*/false)));
}

// --- frozen parameters

Tensor& weight_of(const Model& model) { return unwrap(model.module()).parameter(0, 0); }

TEST(Frozen, WhatReplicaZeroFreezesStaysOnAllAndTrainsAgain) {
  const auto x = waves(20, 3);
  const auto data = Dataset::from_tensor_slices(x, x.sum(1, true)).batch(5);
  std::vector<std::vector<Tensor>> ends;
  for (const int replicas : {1, 2, 3}) {
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    set_random_seed(1);
    Sequential model({Dense(1)});
    const CompileOptions options{.optimizer = SGD({.learning_rate = 0.01, .momentum = 0.9}), .loss = "mse"};
    model.compile(options);
    model.fit(data, {.verbose = 0});
    const auto before = weight_of(model).detach().clone(), bias = weights_of(model)[1];
    weight_of(model).requires_grad_(false);
    model.fit(data, {.verbose = 0});
    for (int replica = 0; replica < replicas; ++replica)
      EXPECT_TRUE(at::equal(weights_of(model, replica)[0], before)) << replicas << " replicas";
    EXPECT_FALSE(at::equal(weights_of(model)[1], bias));
    weight_of(model).requires_grad_(true);
    model.train_on_batch({.x = x, .y = x.sum(1, true)});
    EXPECT_FALSE(at::equal(weights_of(model)[0], before));
    weight_of(model).requires_grad_(false);
    model.compile(options);
    model.fit(data, {.verbose = 0});
    weight_of(model).requires_grad_(true);
    expect_says(message_of<InvalidArgument>([&] { model.fit(data, {.verbose = 0}); }), "call compile");
    model.compile(options);
    model.fit(data, {.verbose = 0});
    ends.push_back(weights_of(model));
  }
  EXPECT_LT(largest_difference(ends[0], ends[1]), 1e-12);
  EXPECT_LT(largest_difference(ends[0], ends[2]), 1e-12);
}

TEST(Frozen, OnOneReplicaAloneIsAnErrorInALoop) {
  const MirroredStrategy strategy(2);
  auto net = strategy.replicate([] { return torch::nn::Linear(3, 1); });
  const auto optimizer = strategy.optimizer(SGD(), net);
  net[0]->weight.requires_grad_(false);
  const auto step = [&] {
    strategy.run(
        [&](ReplicaContext& replica, torch::nn::Linear& mine) {
          optimizer.minimize(replica, mine(at::ones({2, 3})).sum(), 2);
        },
        net);
  };
  expect_says(message_of<InvalidArgument>(step), "\"weight\" is frozen on some replicas only");
}

TEST(Frozen, WorkersMustFreezeTheSame) {
  const auto data = make_data(at::kFloat).batch(7);
  const auto errors = run_workers({.workers = 2}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kFloat, SGD());
    if (strategy.worker_rank() == 1) weight_of(model).requires_grad_(false);
    model.fit(data, {.verbose = 0});
  });
  for (const auto& error : errors) expect_says(error, "frozen parameter dense.weight");
}

TEST(Frozen, ACheckpointSaysWhichWereFrozenAndWhatToDo) {
  const auto x = waves(20, 3);
  const auto data = Dataset::from_tensor_slices(x, x.sum(1, true)).batch(5);
  const auto folder = fresh_folder("fit_results", "frozen").string();
  const OneDeviceStrategy strategy("cpu:0");
  const auto scope = strategy.scope();
  const auto make = [&](bool frozen) {
    set_random_seed(3);
    Sequential model({Dense(1)});
    model.build({3}, at::kDouble);
    weight_of(model).requires_grad_(!frozen);
    model.compile({.optimizer = SGD({.learning_rate = 0.01, .momentum = 0.9}), .loss = "mse"});
    return model;
  };
  for (const bool frozen : {true, false}) {
    auto model = make(frozen);
    model.fit(data, {.verbose = 0});
    model.save_checkpoint(folder + (frozen ? "/frozen" : "/trained"));
  }
  auto trains = make(false);
  const auto before = weights_of(trains);
  const auto says = message_of<InvalidArgument>([&] { trains.load_checkpoint(folder + "/frozen"); });
  expect_says(says, "no state of the optimizer sgd for dense.weight, which are trained here");
  expect_says(says, "load_weights");
  EXPECT_EQ(largest_difference(weights_of(trains), before), 0);
  trains.load_weights(folder + "/frozen");
  trains.fit(data, {.verbose = 0});

  // The reverse goes on as a training in which the weight was frozen then.
  auto expected = make(false), found = make(true);
  expected.fit(data, {.verbose = 0});
  weight_of(expected).requires_grad_(false);
  found.load_checkpoint(folder + "/trained");
  for (auto* const model : {&expected, &found}) model->train_on_batch({.x = x, .y = x.sum(1, true)});
  EXPECT_EQ(largest_difference(weights_of(found), weights_of(expected)), 0);
}

// --- weights of classes

// One-hot labels of positions, and one label of two classes a position.
TEST(ClassWeights, OfOneHotAndBinaryPositionsAreSampleWeights) {
  const auto x = at::arange(60).remainder(10).view({12, 5}), y = at::arange(60).remainder(3).view({12, 5});
  const std::map<std::int64_t, double> weights{{1, 10}, {2, 100}};
  const auto by_label = at::tensor({1.F, 10.F, 100.F}).index_select(0, y.flatten()).view({12, 5});
  const auto binary = y.eq(1).to(at::kFloat).unsqueeze(-1);
  const auto by_binary = at::where(y.eq(1), 10.F, 1.F);
  for (const int replicas : {1, 2}) {
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    const auto expect_weighs = [&](const Tensor& labels, const Loss& loss, const Tensor& weight) {
      Sequential model({Embedding(10, 4), Dense(labels.size(-1))});
      model.compile({.optimizer = SGD({.learning_rate = 0}), .loss = loss});
      const auto fit = [&](const Tensor& sample, FitOptions options) {
        options.verbose = 0;
        return model.fit(Dataset::from_tensor_slices(x, labels, sample).batch(5), options)["loss"][0];
      };
      const auto of_examples = at::linspace(1, 2, 12);
      const double expected = fit(weight, {}), with_examples = fit(weight * of_examples.unsqueeze(-1), {});
      EXPECT_NEAR(fit({}, {.class_weight = weights}), expected, 1e-5 * expected);
      EXPECT_NEAR(fit(of_examples, {.class_weight = weights}), with_examples, 1e-5 * with_examples);
      EXPECT_GT(std::abs(expected - fit({}, {})), 0.1 * expected);
    };
    expect_weighs(at::one_hot(y, 3).to(at::kFloat), CategoricalCrossentropy({.from_logits = true}), by_label);
    expect_weighs(binary, BinaryCrossentropy({.from_logits = true}), by_binary);
    expect_weighs(binary, MeanSquaredError(), by_binary);
  }
}

// --- data that differ between workers

TEST(SameData, IsWhatWorkersEvaluateAndPredict) {
  const auto x = waves(23, 6).to(at::kFloat), y = at::arange(23).remainder(3);
  const auto plain = Dataset::from_tensor_slices(x, y).batch(4);
  const auto check = [&](const char* what, const auto& act, const char* says) {
    const auto errors = run_workers({.workers = 2}, [&](const auto& strategy) {
      const auto scope = strategy.scope();
      set_random_seed(7);
      auto model = make_model(at::kFloat, SGD());
      act(model, strategy.worker_rank());
    });
    SCOPED_TRACE(what);
    for (const auto& error : errors) {
      if (says == nullptr) {
        EXPECT_EQ(error, "");
      } else {
        expect_says(error, says);
      }
    }
  };
  const auto shuffled = [&](int rank) {
    return Dataset::from_tensor_slices(x, y).shuffle(23, {.seed = static_cast<std::uint64_t>(rank)}).batch(4);
  };
  const auto shorter = [&](int rank) {
    const auto examples = 23 - 8 * rank;
    return Dataset::from_generator([=] {
             return [=, at = std::int64_t{0}]() mutable -> std::optional<Example> {
               if (at == examples) return std::nullopt;
               const auto i = at++;
               return Example{.x = x[i], .y = y[i]};
             };
           })
        .batch(4);
  };
  check(
      "the same",
      [&](auto& model, int) {
        EXPECT_EQ(model.predict(plain).size(0), 23);
        model.evaluate(plain);
      },
      nullptr);
  check(
      "another order", [&](auto& model, int rank) { model.evaluate(shuffled(rank)); }, "the workers' data differ");
  check(
      "another order", [&](auto& model, int rank) { model.predict(shuffled(rank)); }, "the workers' data differ");
  check(
      "validation", [&](auto& model, int rank) { model.fit(plain, {.verbose = 0, .validation_data = shuffled(rank)}); },
      "the workers' data differ");
  check(
      "other lengths", [&](auto& model, int rank) { model.evaluate(shorter(rank)); }, "the workers' data differ");
  check(
      "other lengths", [&](auto& model, int rank) { model.predict(shorter(rank)); }, "the workers' data differ");
  check(
      "other labels",
      [&](auto& model, int rank) { model.evaluate(Dataset::from_tensor_slices(x, (y + rank).remainder(3)).batch(4)); },
      "the workers' data differ");
  check(
      "other steps", [&](auto& model, int rank) { model.evaluate(plain, {.steps = 1 + rank}); }, "steps 1");
}

}  // namespace
}  // namespace lockstep
