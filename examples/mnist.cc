// "Distributed training with Keras", in C++: trains a small convolutional network on Fashion-MNIST, or any folder of
// IDX files, on every core or GPU of this machine. With --strategy multi_worker it trains on all machines that the
// program was started on. With --strategy parameter_server, by `lockstep run --workers 2 --ps 1`, workers do not wait
// for each other. With --strategy tpu it trains on the cores of a TPU. TensorFlow's variable may name the machines:
//   export TF_CONFIG='{"cluster": {"worker": ["host0:12345", "host1:12345"]},
//                      "task": {"type": "worker", "index": 0}}'
#include <lockstep/lockstep.h>

#include <iostream>

#include "arguments.h"

namespace ls = lockstep;

namespace {

struct Options {
  std::string policy = "float32";
  std::string strategy = "mirrored";
  int replicas = 0;
  bool synchronous = false;
  int epochs = 12;
  std::int64_t batch = 64;  // images a replica
  std::string data;
  std::uint64_t seed = 0;
};

ls::Strategy make_strategy(const Options& options) {
  std::vector<std::string> devices;
  for (int i = 0; i < options.replicas; ++i) devices.push_back("cpu:" + std::to_string(i));
  if (options.strategy == "one") {
    if (options.replicas > 1)
      throw ls::InvalidArgument("--strategy one has one replica; use mirrored or central for more");
    return ls::OneDeviceStrategy();
  }
  if (options.strategy == "multi_worker") return ls::MultiWorkerMirroredStrategy({.devices = devices});
  if (options.strategy == "parameter_server")
    return ls::ParameterServerStrategy({.devices = devices, .synchronous = options.synchronous});
  if (options.strategy == "tpu") return ls::TPUStrategy(ls::TPUClusterResolver(), {.num_replicas = options.replicas});
  if (options.strategy == "central") return ls::CentralStorageStrategy({.compute_devices = devices});
  return ls::MirroredStrategy({.devices = devices});
}

ls::Example scale(ls::Example example) {
  example.x = example.x.to(at::kFloat).div(255);
  return example;
}

int train(const Options& options) {
  ls::set_random_seed(options.seed);
  ls::set_global_policy(options.policy);
  const auto strategy = make_strategy(options);
  const auto batch = options.batch * strategy.num_replicas_in_sync();
  if (strategy.is_chief()) std::cout << "Replicas: " << strategy.num_replicas_in_sync() << "\n";

  auto [train, test] = options.data.empty() ? ls::datasets::fashion_mnist() : ls::datasets::mnist(options.data);
  const auto train_data = train.map(scale).cache().shuffle(10'000).batch(batch);
  const auto eval_data = test.map(scale).batch(batch);

  const auto scope = strategy.scope();
  ls::Sequential model({ls::Conv2D(32, 3, {.activation = "relu"}), ls::MaxPooling2D(), ls::Flatten(),
                        ls::Dense(64, {.activation = "relu"}), ls::Dense(10)});
  model.compile({.optimizer = ls::Adam(),
                 .loss = ls::SparseCategoricalCrossentropy({.from_logits = true}),
                 .metrics = {"accuracy"}});
  model.fit(train_data, {.epochs = options.epochs,
                         .callbacks = {ls::TensorBoard("logs"), ls::ModelCheckpoint("training_checkpoints/ckpt_{epoch}",
                                                                                    {.save_weights_only = true})}});

  model.load_weights(ls::latest_checkpoint("training_checkpoints"));
  const auto result = model.evaluate(eval_data);
  if (!strategy.is_chief()) return 0;
  std::cout << "Eval loss: " << result["loss"] << ", Eval accuracy: " << result["accuracy"] << "\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  Arguments arguments("Trains a small convolutional network on images of clothes");
  arguments.option("--strategy", options.strategy, "where to train")
      .one_of({"one", "mirrored", "central", "multi_worker", "parameter_server", "tpu"});
  arguments.option("--replicas", options.replicas, "logical CPUs, or cores of the TPU; 0: all").from(0);
  arguments.flag("--synchronous", options.synchronous,
                 "with parameter servers: all workers compute each step together");
  arguments.option("--epochs", options.epochs, "passes over the data").from(1);
  arguments.option("--batch", options.batch, "images a replica in each step").from(1);
  arguments.option("--data", options.data, "folder of MNIST's four IDX files; empty: Fashion-MNIST");
  arguments.option("--policy", options.policy, "float32, mixed_bfloat16 or (on GPUs) mixed_float16");
  arguments.option("--seed", options.seed, "of everything random");
  arguments.parse(argc, argv);
  try {
    return train(options);
  } catch (const ls::Error& error) {
    std::cerr << "mnist: " << error.what() << "\n";
    return 1;
  }
}
