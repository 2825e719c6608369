// A LibTorch loop of your own over any number of processes, with any torch::optim optimizer, under any launcher:
//   build/release/lockstep run -n 2 build/release/examples/ddp
//   mpirun -np 2 build/release/examples/ddp
// Without one this process trains alone. docs/launching.md says what the launchers need for several machines.
#include <lockstep/data/dataset.h>
#include <lockstep/ddp.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/functional/pooling.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <iostream>

#include "arguments.h"

namespace ls = lockstep;

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    convolution = register_module("convolution", torch::nn::Conv2d(1, 32, 3));
    hidden = register_module("hidden", torch::nn::Linear(5408, 64));
    output = register_module("output", torch::nn::Linear(64, 10));
  }
  at::Tensor forward(const at::Tensor& images) {
    const auto features = torch::max_pool2d(torch::relu(convolution(images)), 2);
    return output(torch::relu(hidden(features.flatten(1))));
  }
  torch::nn::Conv2d convolution = nullptr;
  torch::nn::Linear hidden = nullptr, output = nullptr;
};
TORCH_MODULE(Net);

ls::Example scale(ls::Example example) {
  example.x = example.x.to(at::kFloat).div(255);
  return example;
}

ls::Deadline in_a_minute() { return ls::Deadline::after(std::chrono::minutes(1)); }

void train(const ls::Group& group, int epochs, std::int64_t examples) {
  auto [train_data, test_data] = ls::datasets::fashion_mnist();
  // Each rank has its own part of the examples; the last rank's may be one shorter, which `join` takes care of.
  const auto mine =
      train_data.take(examples).shard(group.size(), group.rank()).map(scale).cache().shuffle(10'000).batch(64);
  Net net;
  ls::DistributedDataParallel ddp(net, group);
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(1e-3));
  for (int epoch = 0; epoch < epochs; ++epoch) {
    double loss_sum = 0;
    std::int64_t steps = 0;
    ddp.join([&] {
      auto batches = mine.iterate({.epoch = epoch});
      while (const auto batch = batches.next()) {
        adam.zero_grad();
        const auto loss = torch::nn::functional::cross_entropy(ddp(batch->x), batch->y);
        loss.backward();  // gradients are averaged over the ranks while this goes on
        adam.step();
        loss_sum += loss.item<double>();
        ++steps;
      }
    });
    if (group.rank() == 0)
      std::cout << "epoch " << epoch << ": loss " << loss_sum / static_cast<double>(steps) << std::endl;
  }
  std::array<std::int64_t, 2> right_and_all{};
  const at::NoGradGuard no_gradient;
  auto batches = test_data.shard(group.size(), group.rank()).map(scale).batch(500).iterate();
  while (const auto batch = batches.next()) {
    right_and_all[0] += net(batch->x).argmax(1).eq(batch->y).sum().item<std::int64_t>();
    right_and_all[1] += batch->x.size(0);
  }
  group.all_reduce(ls::buffer_of(std::span(right_and_all)), ls::ReduceOp::sum, in_a_minute());
  if (group.rank() == 0)
    std::cout << "test accuracy: " << static_cast<double>(right_and_all[0]) / static_cast<double>(right_and_all[1])
              << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments("DistributedDataParallel on Fashion-MNIST");
  int epochs = 1;
  std::int64_t examples = 60'000;
  arguments.option("--epochs", epochs, "passes over the data");
  arguments.option("--examples", examples, "so many of the training data");
  arguments.parse(argc, argv);
  try {
    torch::manual_seed(1);
    train(ls::Job::from_environment().group(), epochs, examples);  // all processes that the launcher started
  } catch (const ls::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
