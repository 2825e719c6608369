// "Use Horovod in TensorFlow with Estimators", in C++: every process reads a part of the images, gradients are
// averaged, and process 0 keeps the checkpoints.
//   mpirun -np 4 horovod_estimator
//   lockstep run -n 4 horovod_estimator
//   lockstep run -H host1:4,host2:4 horovod_estimator
#include <lockstep/estimator.h>
#include <lockstep/horovod.h>  // 1. import Horovod
#include <lockstep/lockstep.h>
#include <torch/cuda.h>

#include <iostream>

#include "arguments.h"

namespace hvd = lockstep::horovod;
namespace ls = lockstep;

namespace {

struct Options {
  std::string model_dir = "mnist_convnet_model";
  std::int64_t steps = 4000;  // of all processes together
  std::int64_t batch = 64;    // images a process
  std::string data;
};

ls::EstimatorSpec cnn_model_fn(const ls::Example& /*features*/, ls::ModeKeys mode, const ls::Params& params) {
  ls::EstimatorSpec spec{.model =
                             ls::Sequential({ls::Conv2D(32, 3, {.activation = "relu"}), ls::MaxPooling2D(),
                                             ls::Flatten(), ls::Dense(64, {.activation = "relu"}), ls::Dense(10)})};
  spec.predictions = [](const torch::Tensor& logits) {
    return ls::Predictions{{"classes", logits.argmax(1)}, {"probabilities", logits.softmax(1)}};
  };
  spec.loss = ls::SparseCategoricalCrossentropy({.from_logits = true});
  spec.eval_metric_ops = {"accuracy"};
  if (mode == ls::ModeKeys::train) {
    // 4. wrap the optimizer; its rate grows with the number of processes
    const ls::Adam adam({.learning_rate = params.at("learning_rate") * hvd::size()});
    spec.optimizer = hvd::DistributedOptimizer(adam);
  }
  return spec;
}

ls::Example scale(ls::Example example) {
  example.x = example.x.to(at::kFloat).div(255);
  return example;
}

void train(const Options& options) {
  hvd::init();  // 2. before anything else

  // 3. pin a GPU to this process; without GPUs init has given it its cores
  const ls::OneDeviceStrategy device(torch::cuda::is_available() ? "cuda:" + std::to_string(hvd::local_rank())
                                                                 : "cpu:0");

  const auto [images, test] = options.data.empty() ? ls::datasets::fashion_mnist() : ls::datasets::mnist(options.data);
  const auto train_input = [&, images = images] {
    return images.shard(hvd::size(), hvd::rank()).map(scale).cache().shuffle(10'000).repeat().batch(options.batch);
  };
  const auto eval_input = [&, test = test] { return test.map(scale).batch(500); };

  // 6. checkpoints on process 0 only
  ls::Estimator classifier(cnn_model_fn,
                           {.model_dir = hvd::rank() == 0 ? options.model_dir : "", .train_distribute = device},
                           {{"learning_rate", 5e-4}});
  // 5. all begin as process 0 does, whether anew or from its checkpoint
  classifier.train(
      train_input,
      {.hooks = {hvd::BroadcastGlobalVariablesHook(0),
                 ls::StopAtStepHook({.last_step = std::max<std::int64_t>(1, options.steps / hvd::size())})}});
  if (hvd::rank() == 0) {
    const auto result = classifier.evaluate(eval_input);
    std::cout << "Eval loss: " << result["loss"] << ", Eval accuracy: " << result["accuracy"] << ", step "
              << result["global_step"] << ", processes " << hvd::size() << "\n";
  }
  hvd::barrier();
  hvd::shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  Arguments arguments("Trains a small convolutional network on images of clothes, as Horovod's users do");
  arguments.option("--model-dir", options.model_dir, "for checkpoints and TensorBoard");
  arguments.option("--steps", options.steps, "of all processes together").from(1);
  arguments.option("--batch", options.batch, "images a process in each step").from(1);
  arguments.option("--data", options.data, "folder of MNIST's four IDX files; empty: Fashion-MNIST");
  arguments.parse(argc, argv);
  try {
    train(options);
  } catch (const ls::Error& error) {
    std::cerr << "horovod_estimator: " << error.what() << "\n";
    return 1;
  }
}
