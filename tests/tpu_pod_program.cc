// For tpu_pod_test: what the process of one host of a TPU pod does, by its first argument.
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>

#include "tests/tpu_pod_training.h"

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

void train() {
  const auto topology = initialize_tpu_system();
  const auto strategy = pod();
  std::cout << "topology " << topology.num_devices << " " << topology.num_tasks << " "
            << strategy.num_replicas_in_sync() << " " << strategy.num_local_replicas() << std::endl;
  print("fit", numbers_of_fit(strategy, 1));
  print("launches", numbers_of_fit(strategy, 3));
  print("loop", numbers_of_loop(strategy));
}

// The chief's step is another than the other's.
void differ() {
  const auto strategy = pod();
  const double factor = strategy.is_chief() ? 1 : 2;
  strategy.run(
      [&](ReplicaContext& replica) { return replica.all_reduce(ReduceOp::sum, at::full({}, factor) * factor); });
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

// The last host ends at its third batch.
void lose_one() {
  const auto strategy = pod();
  const auto scope = strategy.scope();
  auto model = Sequential({Flatten(), Dense(10)});
  model.compile({.optimizer = SGD(), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  const auto end = std::make_shared<LambdaCallback>(
      LambdaCallback::Functions{.on_train_batch_end = [chief = strategy.is_chief()](std::int64_t batch, const Logs&) {
        if (batch == 2 && !chief) std::_Exit(3);
      }});
  model.fit(pod_images().batch(24), {.epochs = 10, .verbose = 0, .callbacks = {end}});
}

}  // namespace

int main(int, char** arguments) {
  const std::string act = arguments[1];
  try {
    if (act == "train") train();
    if (act == "differ") differ();
    if (act == "differ in shape") differ_in_shape();
    if (act == "lack a plugin") lack_a_plugin();
    if (act == "take two") take_two();
    if (act == "lose one") lose_one();
  } catch (const std::exception& error) {
    std::cout << "error " << error.what() << std::endl;
    return 1;
  }
}
