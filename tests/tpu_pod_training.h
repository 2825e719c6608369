// Trainings whose numbers do not depend on the strategy, but for rounding.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>
#include <lockstep/lockstep.h>
#include <torch/nn/modules/linear.h>

#include <vector>

#include "gradient/replicated_parameters.h"
#include "strategy/unwrap.h"

namespace lockstep {

inline Dataset pod_images() {
  at::manual_seed(4);
  return Dataset::from_tensor_slices(at::randn({101, 1, 8, 8}), at::randint(10, {101}), at::rand({101}));
}

// Numbers of a fit whose last batches are smaller, and of a batch of one example, of which not all workers have a part.
inline std::vector<double> numbers_of_fit(const Strategy& strategy, std::int64_t steps_per_execution,
                                          const std::vector<AnyCallback>& callbacks = {}) {
  set_random_seed(strategy.is_chief() ? 7 : 100);  // the chief's values count
  const auto scope = strategy.scope();
  auto model = Sequential({Conv2D(4, 3, {.activation = "relu"}), MaxPooling2D(), Flatten(), BatchNormalization(),
                           Dense(16, {.activation = "relu"}), Dense(10)});
  model.compile({.optimizer = Adam(),
                 .loss = SparseCategoricalCrossentropy({.from_logits = true}),
                 .metrics = {"accuracy"},
                 .steps_per_execution = steps_per_execution});
  const auto data = pod_images().batch(24), one = pod_images().take(1).batch(1);
  std::vector<double> numbers;
  const auto add = [&](const Tensor& tensor) {
    numbers.push_back(tensor.to(at::kDouble).sum().item<double>());
    numbers.push_back(tensor.to(at::kDouble).square().sum().item<double>());
  };
  add(model.predict(one));
  for (const auto& [name, values] : model.fit(data, {.epochs = 10, .verbose = 0, .callbacks = callbacks}).history)
    if (name == "loss" || name == "accuracy") numbers.insert(numbers.end(), values.begin(), values.end());
  auto& parameters = unwrap(model.module());
  for (std::size_t i = 0; i < parameters.slots().size(); ++i) add(parameters.parameter(0, i));
  for (const auto& average : parameters.average_buffers()) add(average);
  const auto logs = model.evaluate(data);
  numbers.insert(numbers.end(), {logs["loss"], logs["accuracy"]});
  add(model.predict(data));
  return numbers;
}

// Numbers of a loop of the program's own, whose replicas also gather values in their order.
inline std::vector<double> numbers_of_loop(const Strategy& strategy) {
  set_random_seed(strategy.is_chief() ? 3 : 100);
  auto net = strategy.replicate([] { return torch::nn::Linear(6, 3); });
  const auto optimizer = strategy.optimizer(SGD({.learning_rate = 0.1}), net);
  at::manual_seed(4);
  const auto data = strategy.distribute(Dataset::from_tensor_slices(at::randn({48, 6}), at::randn({48, 3})).batch(16));
  const auto step = compiled([&](ReplicaContext& replica, torch::nn::Linear& own, const Example& part) {
    const auto loss = (own(part.x) - part.y).square().sum();
    optimizer.minimize(replica, loss, static_cast<double>(part.size()));
    const auto gathered = replica.all_gather(part.x.select(1, 0).contiguous());
    const auto weights = at::arange(gathered.size(0), gathered.options());
    return std::pair(loss.detach(), (gathered * weights).sum());
  });
  std::vector<double> numbers;
  for (int epoch = 0; epoch < 5; ++epoch) {
    auto batches = data.iterate({.epoch = epoch});
    while (auto batch = batches.next()) {
      const auto results = strategy.run(step, net, *batch);
      std::vector<Tensor> losses;
      for (const auto& result : results) losses.push_back(result.first);
      numbers.push_back(strategy.reduce(ReduceOp::sum, PerReplica<Tensor>(std::move(losses))).item<double>());
      numbers.push_back(results[0].second.item<double>());
    }
  }
  numbers.push_back(net[0]->weight.square().sum().item<double>());
  return numbers;
}

// The weights after a training with dropout, which draws numbers of its own on every replica. It depends on the kind of
// devices.
inline std::vector<double> numbers_of_dropout(const Strategy& strategy) {
  set_random_seed(strategy.is_chief() ? 5 : 100);
  const auto scope = strategy.scope();
  auto model = Sequential({Flatten(), Dropout(0.5), Dense(10)});
  model.compile({.optimizer = SGD(), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  model.fit(pod_images().batch(24), {.epochs = 2, .verbose = 0});
  std::vector<double> numbers;
  for (const auto& parameter : unwrap(model.module()).module(0).parameters())
    numbers.push_back(parameter.square().sum().item<double>());
  return numbers;
}

// Numbers of a training in which one worker's data end before the other's.
inline std::vector<double> numbers_of_unequal_data(const Strategy& strategy) {
  set_random_seed(5);
  const auto scope = strategy.scope();
  auto model = Sequential({Flatten(), Dense(10)});
  model.compile({.optimizer = SGD(), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  const auto data = pod_images().take(strategy.is_chief() ? 40 : 20).batch(10);
  return model.fit(data.with_options({.auto_shard_policy = AutoShardPolicy::off}), {.epochs = 2, .verbose = 0})
      .history.at("loss");
}

}  // namespace lockstep
