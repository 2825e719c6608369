// Predicts clicks from 26 fields of ids, with an embedding table of 5,000,000 x 32 that lies on parameter servers:
//   lockstep run --workers 2 --ps 2 build/release/examples/click
// The click log is made by a seed: a few ids of each field are frequent and most are rare. Each has a hidden weight for
// the chance of a click.
#include <ATen/Functions.h>
#include <lockstep/lockstep.h>

#include <iostream>

#include "arguments.h"

namespace ls = lockstep;

namespace {

constexpr std::int64_t kFields = 26, kIdsOfField = 192'308, kIds = kFields * kIdsOfField, kWidth = 32;

// An id has one hidden weight, wherever it occurs.
at::Tensor hidden_weights(const at::Tensor& ids) {
  const auto hash = at::sin(ids.to(at::kDouble) * 12.9898) * 43758.5453;
  return 2.4 * (hash - at::floor(hash) - 0.5);
}

ls::Dataset make_log(std::int64_t examples, std::uint64_t seed) {
  at::manual_seed(seed);  // all processes have the same
  const auto rank =
      at::pow(static_cast<double>(kIdsOfField), at::rand({examples, kFields}, at::kDouble).square()).to(at::kLong);
  const auto ids = rank - 1 + at::arange(kFields) * kIdsOfField;
  const auto chance = at::sigmoid(hidden_weights(ids).sum(1, /*keepdim=*/true));
  return ls::Dataset::from_tensor_slices(ids, at::bernoulli(chance).to(at::kFloat));
}

int train(std::int64_t examples, int epochs, bool synchronous, const std::string& backup) {
  ls::set_random_seed(1);
  const ls::ParameterServerStrategy strategy({.synchronous = synchronous});
  const auto train_data = make_log(examples, 1).shuffle(examples).batch(512);
  const auto test_data = make_log(20'000, 2).batch(512);

  const auto scope = strategy.scope();
  ls::Sequential model({ls::ShardedEmbedding(kIds, kWidth), ls::Flatten(), ls::Dense(64, {.activation = "relu"}),
                        ls::Dense(32, {.activation = "relu"}), ls::Dense(1)});
  model.compile({.optimizer = ls::Adam({.learning_rate = 0.002}),
                 .loss = ls::BinaryCrossentropy({.from_logits = true}),
                 .metrics = {ls::BinaryAccuracy({.threshold = 0})}});
  std::vector<ls::AnyCallback> callbacks;
  if (!backup.empty()) callbacks.emplace_back(ls::BackupAndRestore(backup, {.save_freq = 500}));
  model.fit(train_data, {.epochs = epochs, .callbacks = callbacks});
  const auto result = model.evaluate(test_data, {.verbose = 0});
  if (strategy.is_chief()) std::cout << "test accuracy " << result["binary_accuracy"] << "\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::int64_t examples = 400'000;
  int epochs = 2;
  bool synchronous = false;
  std::string backup;
  Arguments arguments("Trains a click model with a large embedding table");
  arguments.option("--examples", examples, "to train on");
  arguments.option("--epochs", epochs, "times that all are seen");
  arguments.flag("--synchronous", synchronous, "workers compute each step together");
  arguments.option("--backup", backup, "folder of checkpoints from which training goes on");
  arguments.parse(argc, argv);
  try {
    return train(examples, epochs, synchronous, backup);
  } catch (const ls::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
