// Tests training's promises for any number of replicas: the same weights, equal copies, equal runs, and nothing lost by
// a failure.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <random>
#include <thread>

#include "data/stored_tensor.h"
#include "gradient/replicated_parameters.h"
#include "strategy/unwrap.h"

namespace lockstep {
namespace {

// 26 examples in batches of 7: the last has 5, so that with 4 replicas sizes are 2, 1, 1, 1, and one of 3 leaves a
// replica idle.
Dataset make_data(at::ScalarType dtype, bool weighted, std::int64_t examples = 26) {
  torch::manual_seed(4);
  const auto x = torch::randn({examples, 6}, dtype);
  const auto y = torch::randint(3, {examples}, torch::kLong);
  const auto weight = weighted ? torch::rand({examples}, dtype) : Tensor();
  return Dataset::from_tensor_slices(x, y, weight);
}

Sequential make_model(at::ScalarType dtype, const Optimizer& optimizer) {
  set_random_seed(7);
  Sequential model({Dense(9, {.activation = "tanh"}), Dense(3)});
  model.compile(
      {.optimizer = optimizer, .loss = SparseCategoricalCrossentropy({.from_logits = true}), .metrics = {"accuracy"}});
  model.build({6}, dtype);
  return model;
}

std::vector<Tensor> weights_of(const Model& model, int replica = 0) {
  std::vector<Tensor> weights;
  const auto& parameters = unwrap(model.module());
  for (std::size_t i = 0; i < parameters.slots().size(); ++i)
    weights.push_back(parameters.parameter(replica, i).detach().clone());
  return weights;
}

double largest_difference(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  return largest;
}

void expect_equal_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
}

// Weights after `steps` steps of fit under the strategy.
std::vector<Tensor> train(const Strategy& strategy, const Optimizer& optimizer, at::ScalarType dtype, int steps,
                          bool weighted) {
  const auto scope = strategy.scope();
  auto model = make_model(dtype, optimizer);
  const auto data = make_data(dtype, weighted).shuffle(26, {.seed = 3}).batch(7).repeat();
  model.fit(data, {.verbose = 0, .steps_per_epoch = steps});
  for (int replica = 1; replica < strategy.num_replicas_in_sync(); ++replica) {
    expect_equal_bits(weights_of(model, replica), weights_of(model));
  }
  EXPECT_EQ(model.iterations(), steps);
  return weights_of(model);
}

struct NamedOptimizer {
  const char* name;
  Optimizer optimizer;
};

std::vector<NamedOptimizer> all_optimizers() {
  return {{"sgd", SGD({.learning_rate = 0.1})},
          {"momentum", SGD({.learning_rate = 0.05, .momentum = 0.9})},
          {"adam", Adam({.learning_rate = 0.01, .epsilon = 1e-2})},
          {"adamw", AdamW({.learning_rate = 0.01, .epsilon = 1e-2})},
          {"sgd, clipnorm", SGD({.learning_rate = 0.1, .clipnorm = 0.1})},
          {"momentum, clipvalue", SGD({.learning_rate = 0.05, .momentum = 0.9, .clipvalue = 0.02})},
          {"adam, global clipnorm", Adam({.learning_rate = 0.01, .epsilon = 1e-2, .global_clipnorm = 0.1})},
          {"adamw, clipnorm", AdamW({.learning_rate = 0.01, .epsilon = 1e-2, .clipnorm = 0.1})}};
}

std::vector<std::string> cpus(int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back("cpu:" + std::to_string(i));
  return names;
}

TEST(Replicas, FitGivesTheSameWeightsOnAnyNumber) {
  for (const bool weighted : {false, true}) {
    for (const auto& [name, optimizer] : all_optimizers()) {
      SCOPED_TRACE(name);
      const auto one = train(OneDeviceStrategy(), optimizer, at::kDouble, 50, weighted);
      const auto one_float = train(OneDeviceStrategy(), optimizer, at::kFloat, 20, weighted);
      for (int replicas = 1; replicas <= 4; ++replicas) {
        const MirroredStrategy strategy(replicas);
        EXPECT_LE(largest_difference(train(strategy, optimizer, at::kDouble, 50, weighted), one), 1e-9) << replicas;
        EXPECT_LE(largest_difference(train(strategy, optimizer, at::kFloat, 20, weighted), one_float), 1e-5)
            << replicas;
      }
    }
  }
}

TEST(Replicas, EveryStrategyGivesTheSameWeights) {
  for (const auto& [name, optimizer] : all_optimizers()) {
    SCOPED_TRACE(name);
    const auto one = train(OneDeviceStrategy(), optimizer, at::kDouble, 50, true);
    const std::vector<Strategy> strategies{
        MirroredStrategy({.devices = cpus(3),
                          .cross_device_ops = CrossDeviceOps::reduction_to_one_device,
                          .reduce_to_device = "cpu:1"}),
        MirroredStrategy({.devices = cpus(3), .cross_device_ops = CrossDeviceOps::hierarchical_copy_all_reduce}),
        CentralStorageStrategy({.compute_devices = cpus(3)})};
    for (const auto& strategy : strategies)
      EXPECT_LE(largest_difference(train(strategy, optimizer, at::kDouble, 50, true), one), 1e-9);
  }
}

TEST(Replicas, AReplicaWithoutExamplesJoins) {
  const auto last_batch_of_two = [](int replicas) {
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD({.learning_rate = 0.1, .momentum = 0.5}));
    const auto history = model.fit(make_data(at::kDouble, false, 10).batch(8), {.epochs = 3, .verbose = 0});
    EXPECT_EQ(history["loss"].size(), 3U);
    return std::pair(weights_of(model), history["loss"].back());
  };
  const auto one = last_batch_of_two(1);
  const auto four = last_batch_of_two(4);
  EXPECT_LE(largest_difference(one.first, four.first), 1e-9);
  EXPECT_NEAR(one.second, four.second, 1e-12);
}

// A user's module with torch's own Dropout and random numbers.
struct NoisyImpl : torch::nn::Module {
  NoisyImpl() {
    first = register_module("first", torch::nn::Linear(6, 16));
    dropout = register_module("dropout", torch::nn::Dropout(0.5));
    last = register_module("last", torch::nn::Linear(16, 3));
  }
  Tensor forward(const Tensor& x) {
    const auto noisy = torch::relu(first(x + 0.1 * torch::randn_like(x)));
    std::this_thread::sleep_for(std::chrono::microseconds(delay() % 300));  // another timing in each run
    return last(dropout(noisy));
  }
  static unsigned delay() {
    static thread_local std::mt19937 generator(std::random_device{}());
    return static_cast<unsigned>(generator());
  }
  torch::nn::Linear first = nullptr, last = nullptr;
  torch::nn::Dropout dropout = nullptr;
};

TEST(Replicas, TwoRunsWithOneSeedAreEqualBitForBit) {
  const auto run = [](std::uint64_t seed) {
    set_random_seed(seed);
    const MirroredStrategy strategy(3);
    const auto scope = strategy.scope();
    Model model([] { return std::make_shared<NoisyImpl>(); });
    model.compile({.optimizer = Adam(), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    const auto noise = [](Example example) {
      example.x = example.x + 0.01 * torch::rand_like(example.x);
      return example;
    };
    model.fit(make_data(at::kFloat, false).map(noise, {.num_parallel_calls = 3}).shuffle(20).batch(7),
              {.epochs = 8, .verbose = 0});
    return weights_of(model);
  };
  const auto first = run(5);
  expect_equal_bits(run(5), first);
  EXPECT_GT(largest_difference(run(6), first), 1e-3);
}

// --- parameters of every kind

struct KindsImpl : torch::nn::Module {
  KindsImpl() {
    shared = register_module("shared", torch::nn::Linear(6, 6));
    frozen = register_module("frozen", torch::nn::Linear(6, 6));
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
    rarely = register_module("rarely", torch::nn::Linear(6, 6));
    never = register_module("never", torch::nn::Linear(6, 6));
    last = register_module("last", torch::nn::Linear(6, 5));
    register_parameter("tied", shared->weight);
    to(at::kDouble);
  }
  Tensor forward(const Tensor& x) {
    auto h = torch::tanh(shared(x));
    h = torch::tanh(shared(h));                // used twice
    h = torch::matmul(h, shared->weight.t());  // and a third time, as a tied weight
    h = frozen(h);
    if (x.size(0) > 2) h = h + rarely(h);  // in larger parts of a batch only
    return last(h);
  }
  torch::nn::Linear shared = nullptr, frozen = nullptr, rarely = nullptr, never = nullptr, last = nullptr;
};

TEST(Replicas, ParametersOfEveryKindAreUpdatedAsOnOneReplica) {
  // The loss looks at three of the five outputs.
  const Loss loss("partial", [](const Tensor& y_true, const Tensor& y_pred) {
    return torch::nn::functional::log_softmax(y_pred.narrow(1, 0, 3), torch::nn::functional::LogSoftmaxFuncOptions(1))
        .gather(1, y_true.unsqueeze(1))
        .neg()
        .squeeze(1);
  });
  const auto run = [&](const Strategy& strategy, std::int64_t batch, std::int64_t examples) {
    const auto scope = strategy.scope();
    set_random_seed(11);
    Model model([] { return std::make_shared<KindsImpl>(); });
    model.compile({.optimizer = AdamW({.learning_rate = 0.01, .epsilon = 1e-2, .global_clipnorm = 1}), .loss = loss});
    model.fit(make_data(at::kDouble, false, examples).batch(batch), {.epochs = 5, .verbose = 0});
    return model;
  };
  const auto one = run(OneDeviceStrategy(), 24, 24);
  for (const int replicas : {2, 3, 4}) {
    const auto many = run(MirroredStrategy(replicas), 24, 24);
    EXPECT_LE(largest_difference(weights_of(many), weights_of(one)), 1e-9) << replicas;
  }
  EXPECT_LE(largest_difference(weights_of(run(CentralStorageStrategy({.compute_devices = cpus(3)}), 24, 24)),
                               weights_of(one)),
            1e-9);
  // 2 replicas of 5 examples: parts of 3 and 2, of which only the first uses `rarely`.
  const auto partly = run(MirroredStrategy(2), 5, 5);
  set_random_seed(11);
  const OneDeviceStrategy one_device;
  auto fresh = one_device.replicate([] { return std::make_shared<KindsImpl>(); });
  const auto& parameters = unwrap(partly.module());
  ASSERT_EQ(parameters.slots()[0].name, "tied");
  for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
    const auto& slot = parameters.slots()[i];
    const bool changed = !torch::equal(parameters.parameter(0, i), *fresh[0]->named_parameters().find(slot.name));
    const bool should_change = !slot.name.starts_with("frozen") && !slot.name.starts_with("never");
    EXPECT_EQ(changed, should_change) << slot.name;
    EXPECT_TRUE(torch::equal(parameters.parameter(0, i), parameters.parameter(1, i))) << slot.name;
  }
}

TEST(Replicas, AModelWithNothingToTrainIsAnError) {
  const auto make = [] {
    auto linear = std::make_shared<torch::nn::LinearImpl>(6, 3);
    for (auto& parameter : linear->parameters()) parameter.set_requires_grad(false);
    return linear;
  };
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  Model model(make);
  model.compile({.loss = SparseCategoricalCrossentropy({.from_logits = true})});
  EXPECT_THROW(model.fit(make_data(at::kFloat, false).batch(8), {.verbose = 0}), InvalidArgument);
}

// --- failures

struct FailingImpl : torch::nn::Module {
  FailingImpl() { linear = register_module("linear", torch::nn::Linear(6, 3)); }
  Tensor forward(const Tensor& x) {
    if (fail && x.size(0) == 3) throw std::runtime_error("three is too many");
    return linear(x);
  }
  static inline std::atomic<bool> fail = true;
  torch::nn::Linear linear = nullptr;
};

TEST(Replicas, AnExceptionInOneReplicaComesOutAndLeavesTheWeightsWhole) {
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  Model model([] { return std::make_shared<FailingImpl>(); });
  model.compile({.optimizer = Adam(), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  const auto before = weights_of(model);
  const auto data = make_data(at::kFloat, false, 5).batch(5);  // parts of 3 and 2: only replica 0 fails
  FailingImpl::fail = true;
  try {
    model.fit(data, {.verbose = 0});
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "three is too many");
  }
  expect_equal_bits(weights_of(model, 0), before);
  expect_equal_bits(weights_of(model, 1), before);
  FailingImpl::fail = false;
  model.fit(data, {.epochs = 2, .verbose = 0});
  EXPECT_EQ(model.iterations(), 2);
  expect_equal_bits(weights_of(model, 1), weights_of(model, 0));
}

// --- custom loops

TEST(Replicas, ACustomLoopGivesTheWeightsOfFit) {
  const MirroredStrategy strategy(3);
  const auto scope = strategy.scope();
  const auto make = [] { return torch::nn::Linear(6, 3); };
  const auto data = make_data(at::kFloat, false).batch(7);
  Model model(make);
  model.compile({.optimizer = Adam(), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  auto net = strategy.replicate(make);
  Archive initial;
  model.module().trackable().save(initial, "");
  net.trackable().load(initial, "")();
  model.fit(data, {.epochs = 3, .verbose = 0});

  const auto optimizer = strategy.optimizer(Adam(), net);
  const SparseCategoricalCrossentropy loss({.from_logits = true});
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (auto& batch : strategy.distribute(data)) {
      strategy.run(
          [&](ReplicaContext& replica, torch::nn::Linear& own, const Example& part) {
            if (part.size() == 0) return optimizer.apply_gradients(replica, 0);
            const auto terms = loss.terms(part.y, own(part.x));
            optimizer.minimize(replica, terms.sum, terms.divisor);
          },
          net, batch);
    }
  }
  for (int replica = 0; replica < 3; ++replica) {
    EXPECT_TRUE(torch::equal(net[replica]->weight, weights_of(model)[0]));
    EXPECT_TRUE(torch::equal(net[replica]->bias, weights_of(model)[1]));
  }
}

// --- evaluate and predict

TEST(Replicas, PredictGivesEachExampleOnceInOrder) {
  for (const int replicas : {1, 2, 3, 4}) {
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    Sequential model({Activation("linear")});
    const auto x = torch::arange(26.0).view({26, 1});
    EXPECT_TRUE(torch::equal(model.predict(Dataset::from_tensor_slices(x).batch(7)), x)) << replicas;
  }
}

TEST(Replicas, EvaluateIsExactOnAnyNumber) {
  std::vector<Logs> results;
  for (const int replicas : {1, 2, 3, 4}) {
    const MirroredStrategy strategy(replicas);
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, SGD());
    results.push_back(model.evaluate(make_data(at::kDouble, true).batch(7)));
    EXPECT_NEAR(results.back()["loss"], results[0]["loss"], 1e-12);
    EXPECT_EQ(results.back()["accuracy"], results[0]["accuracy"]);
  }
}

TEST(Replicas, RunningStatisticsAreAveragedForEvaluation) {
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  Sequential model({BatchNormalization({.momentum = 0}), Dense(3)});
  model.compile({.optimizer = SGD({.learning_rate = 0}), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  const auto data = make_data(at::kFloat, false, 8).batch(8);
  model.fit(data, {.verbose = 0});
  model.evaluate(data);
  const auto x = data.iterate().next()->x;
  Archive saved;
  model.module().trackable().save(saved, "");
  const auto expected = (x.narrow(0, 0, 4).mean(0) + x.narrow(0, 4, 4).mean(0)) / 2;
  EXPECT_TRUE(
      torch::allclose(data::from_stored(saved.tensor("batch_normalization.running_mean")), expected, 1e-5, 1e-6));

  // Outputs are those of the averages, and training goes on with each replica's own.
  Sequential same({BatchNormalization(), Dense(3)});
  same.build({6});
  same.module().trackable().load(saved, "")();
  EXPECT_TRUE(torch::equal(model.predict(data), same.predict(data)));
  const auto& parameters = unwrap(model.module());
  EXPECT_TRUE(torch::allclose(parameters.buffer(1, 0), x.narrow(0, 4, 4).mean(0), 1e-5, 1e-6));
}

TEST(Replicas, ClassWeightsActAsSampleWeights) {
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  const auto plain = make_data(at::kDouble, false);
  auto by_class = make_model(at::kDouble, SGD({.learning_rate = 0.1}));
  by_class.fit(plain.batch(7), {.verbose = 0, .class_weight = {{0, 2.0}, {2, 0.5}}});
  auto by_sample = make_model(at::kDouble, SGD({.learning_rate = 0.1}));
  by_sample.fit(plain
                    .map([](Example example) {
                      const auto label = example.y.item<std::int64_t>();
                      example.weight = torch::tensor(label == 0 ? 2.0 : label == 2 ? 0.5 : 1.0);
                      return example;
                    })
                    .batch(7),
                {.verbose = 0});
  EXPECT_LE(largest_difference(weights_of(by_class), weights_of(by_sample)), 1e-9);
}

}  // namespace
}  // namespace lockstep
