// For tpu_pod_test: what the process of one host of a TPU pod does, by its first argument.
#include <cstdlib>
#include <functional>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>

#include "tests/tpu_pod_training.h"
#include "tpu/programs/programs.h"

namespace {

using namespace lockstep;

void print(const char* what, const std::vector<double>& numbers) {
  std::cout << what << std::setprecision(17);
  for (const double number : numbers) std::cout << " " << number;
  std::cout << std::endl;
}

TPUStrategy pod(const std::string& plugin = "") {
  return TPUStrategy(TPUClusterResolver("", {.plugin = plugin, .start_timeout_seconds = 60}), {.timeout_seconds = 60});
}

void train_together() {
  const auto topology = initialize_tpu_system();
  const auto strategy = pod();
  std::cout << "topology " << topology.num_devices << " " << topology.num_tasks << " "
            << strategy.num_replicas_in_sync() << " " << strategy.num_local_replicas() << std::endl;
  print("fit", numbers_of_fit(strategy, 1));
  print("launches", numbers_of_fit(strategy, 3));
  print("loop", numbers_of_loop(strategy));
  print("dropout", numbers_of_dropout(strategy));
  print("unequal", numbers_of_unequal_data(strategy));
}

// Stops in the fifth epoch, as all hosts of a pod do when one is preempted; with `whole` it goes on from there.
void train_with_backups(bool whole) {
  const auto breaks = std::make_shared<LambdaCallback>(LambdaCallback::Functions{.on_epoch_begin = [=](int epoch) {
    if (epoch == 4 && !whole) throw Error("preempted");
  }});
  const auto strategy = pod();
  print("fit", numbers_of_fit(strategy, 1, {BackupAndRestore(std::getenv("BACKUPS")), breaks}));
  print("compiled", {static_cast<double>(programs::devices_of(unwrap(strategy)).counts().compiled)});
}

// The chief's step is another than the other's.
void differ() {
  const auto strategy = pod();
  const double factor = strategy.is_chief() ? 1 : 2;
  strategy.run(
      [&](ReplicaContext& replica) { return replica.all_reduce(ReduceOp::sum, at::full({}, factor) * factor); });
}

// The last batch has more rows on the chief: its step is compiled already, and the other's would be another one.
void differ_in_rows() {
  const auto strategy = pod();
  const auto data = strategy.distribute(Dataset::from_tensor_slices(at::zeros({14, 3})).batch(8));
  const auto step = compiled([](ReplicaContext&, const Example& part) { return part.x.sum(); });
  auto batches = data.iterate();
  while (auto batch = batches.next()) strategy.run(step, *batch);
}

// The chief's batch has more columns.
void differ_in_shape() {
  const auto strategy = pod();
  const auto scope = strategy.scope();
  auto model = Model([] { return torch::nn::Flatten(); });
  model.predict(Dataset::from_tensor_slices(at::zeros({8, strategy.is_chief() ? 3 : 2})).batch(8));
}

// The chief has no plugin.
void lack_a_plugin() { pod(std::string(std::getenv("TPU_WORKER_ID")) == "0" ? "/no/plugin.so" : ""); }

// Too few replicas, of which one host would have none.
void take_two() { TPUStrategy(TPUClusterResolver(), {.num_replicas = 2}); }

// Opens the devices as if no other process were there.
void be_alone() { TPUStrategy(TPUClusterResolver("", {.cluster = Cluster()})); }

// The plugin ends the last host's process at a launch, so that the chief's devices wait for its. The plugin waits on
// the store of the Job that opened the devices, which is not the strategy's.
void lose_one() {
  const auto topology = initialize_tpu_system();
  print("loop", numbers_of_loop(pod()));
}

Sequential model_of(const std::vector<Layer>& layers) {
  auto model = Sequential(layers);
  model.compile({.optimizer = SGD(), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  return model;
}

// A training with what a host does after its second batch.
void fit_with(const std::function<void(Sequential& model, bool is_chief)>& act) {
  const auto strategy = pod();
  const auto scope = strategy.scope();
  auto model = model_of({Flatten(), Dense(10)});
  const bool is_chief = strategy.is_chief();
  const auto acts = std::make_shared<LambdaCallback>(
      LambdaCallback::Functions{.on_train_batch_end = [&](std::int64_t batch, const Logs&) {
        if (batch == 1) act(model, is_chief);
      }});
  model.fit(pod_images().batch(24), {.verbose = 0, .callbacks = {acts}});
}

// A callback fails on the last host, while the chief's devices wait for its next step.
void fail_on_one() {
  fit_with([](Sequential&, bool is_chief) {
    if (!is_chief) throw Error("the disk is full");
  });
}

// The last host cannot read its third batch, while the devices compute the second.
void fail_to_read_on_one() {
  const auto strategy = pod();
  const auto scope = strategy.scope();
  auto model = model_of({Flatten(), Dense(10)});
  constexpr std::int64_t kBatch = 24;
  const auto x = at::arange(101, at::kFloat).unsqueeze(1), y = at::zeros({101}, at::kLong);
  const auto data = Dataset::from_tensor_slices(x, y).batch(kBatch).map([&](Example batch) {
    if (!strategy.is_chief() && batch.x.max().item<double>() >= 2 * kBatch) throw Error("the file is cut short");
    batch.x = batch.x / 101;
    return batch;
  });
  try {
    model.fit(data, {.verbose = 0});
  } catch (const Error&) {
    std::vector<double> weights;
    for (const auto& parameter : unwrap(model.module()).module(0).parameters())
      weights.push_back(parameter.square().sum().item<double>());
    print("weights", weights);
    throw;
  }
}

void differ_in_learning_rate() {
  fit_with([](Sequential& model, bool is_chief) {
    if (is_chief) model.set_learning_rate(0.5);
  });
}

// Each host trains two equal models, whose programs are compiled already, in another order.
void differ_in_order() {
  const auto strategy = pod();
  const auto scope = strategy.scope();
  std::vector<Sequential> models{model_of({Flatten(), Dense(10)}), model_of({Flatten(), Dense(10)})};
  const auto batch = *pod_images().batch(24).iterate().next();
  for (auto& model : models) model.train_on_batch(batch);
  if (!strategy.is_chief()) std::swap(models[0], models[1]);
  for (auto& model : models) model.train_on_batch(batch);
}

// Trains in this process alone, with as many devices as the environment says.
void train_alone() { print("dropout", numbers_of_dropout(TPUStrategy())); }

}  // namespace

int main(int, char** arguments) {
  const std::string act = arguments[1];
  try {
    if (act == "train") train_together();
    if (act == "break off") train_with_backups(false);
    if (act == "go on") train_with_backups(true);
    if (act == "differ") differ();
    if (act == "differ in rows") differ_in_rows();
    if (act == "differ in shape") differ_in_shape();
    if (act == "lack a plugin") lack_a_plugin();
    if (act == "take two") take_two();
    if (act == "be alone") be_alone();
    if (act == "lose one") lose_one();
    if (act == "fail on one") fail_on_one();
    if (act == "fail to read on one") fail_to_read_on_one();
    if (act == "differ in learning rate") differ_in_learning_rate();
    if (act == "differ in order") differ_in_order();
    if (act == "train alone") train_alone();
  } catch (const std::exception& error) {
    std::cout << "error " << error.what() << std::endl;
    return 1;
  }
}
