// Writes what interop_test.py reads: checkpoints, batches, outputs and logs of the seed CNN. interop_program FOLDER
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>

#include "data/stored_tensor.h"

using namespace lockstep;

namespace {

constexpr int kSteps = 20;

// Trains the seed CNN on `steps` batches and leaves its weights before and after in `folder`.
void train(const std::string& folder, const std::string& name, const Optimizer& optimizer,
           const std::vector<Example>& batches) {
  set_random_seed(5);
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  Sequential model(
      {Conv2D(32, 3, {.activation = "relu"}), MaxPooling2D(), Flatten(), Dense(64, {.activation = "relu"}), Dense(10)});
  model.compile({.optimizer = optimizer, .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  model.build({1, 28, 28});
  model.save_weights(folder + "/" + name + "_initial");
  for (const auto& batch : batches) model.train_on_batch(batch);
  model.save_weights(folder + "/" + name + "_final");
  Archive outputs;
  outputs.tensors["outputs"] = data::to_stored(model.predict(Dataset::from_tensor_slices(batches[0].x).batch(50)));
  write_archive(folder + "/" + name + "_outputs", outputs);
}

}  // namespace

int main(int, char** argv) {
  const std::string folder = argv[1];
  at::manual_seed(1);
  Archive stored;
  std::vector<Example> batches;
  for (int i = 0; i < kSteps; ++i) {
    batches.push_back({at::rand({101, 1, 28, 28}), at::randint(10, {101}, at::kLong)});  // odd: parts of 51 and 50
    stored.tensors["x" + std::to_string(i)] = data::to_stored(batches.back().x);
    stored.tensors["y" + std::to_string(i)] = data::to_stored(batches.back().y);
  }
  write_archive(folder + "/batches", stored);
  train(folder, "momentum", SGD({.learning_rate = 0.01, .momentum = 0.9}), batches);
  train(folder, "adam", Adam({.learning_rate = 0.001, .epsilon = 1e-3}), batches);

  Sequential model({Flatten(), Dense(10)});
  model.compile({.loss = SparseCategoricalCrossentropy({.from_logits = true}), .metrics = {"accuracy"}});
  const auto data = Dataset::from_tensor_slices(batches[0].x, batches[0].y).batch(20);
  const auto history = model.fit(data, {.epochs = 3,
                                        .verbose = 0,
                                        .callbacks = {TensorBoard(folder + "/logs", {.update_freq = 2})},
                                        .validation_data = data});
  Archive losses;
  losses.tensors["loss"] = data::to_stored(at::tensor(history["loss"]));
  losses.tensors["val_accuracy"] = data::to_stored(at::tensor(history["val_accuracy"]));
  write_archive(folder + "/history", losses);
}
