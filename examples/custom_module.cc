// Your own torch::nn::Module, with BatchNorm and Dropout, under compile and fit.
#include <lockstep/lockstep.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <iostream>

namespace ls = lockstep;

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    convolution = register_module("convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 5).stride(2)));
    norm = register_module("norm", torch::nn::BatchNorm2d(16));
    dropout = register_module("dropout", torch::nn::Dropout(0.25));
    output = register_module("output", torch::nn::Linear(16 * 12 * 12, 10));
  }
  torch::Tensor forward(const torch::Tensor& images) {
    const auto features = torch::relu(norm(convolution(images)));
    return output(dropout(features.flatten(1)));
  }
  torch::nn::Conv2d convolution = nullptr;
  torch::nn::BatchNorm2d norm = nullptr;
  torch::nn::Dropout dropout = nullptr;
  torch::nn::Linear output = nullptr;
};
TORCH_MODULE(Net);

ls::Example scale(ls::Example example) {
  example.x = example.x.to(at::kFloat).div(255);
  return example;
}

}  // namespace

int main() {
  ls::set_random_seed(1);
  const ls::MirroredStrategy strategy;
  const auto scope = strategy.scope();
  auto [train, test] = ls::datasets::fashion_mnist();
  const auto batch = 64 * strategy.num_replicas_in_sync();

  ls::Model model([] { return Net(); });
  model.compile(
      {.optimizer = ls::AdamW({.learning_rate = ls::CosineDecay(2e-3, 2 * 60'000 / batch), .global_clipnorm = 1.0}),
       .loss = ls::SparseCategoricalCrossentropy({.from_logits = true}),
       .metrics = {"accuracy", ls::SparseTopKCategoricalAccuracy({.k = 3})}});
  std::cout << model.summary();
  model.fit(train.map(scale).cache().shuffle(10'000).batch(batch),
            {.epochs = 2, .validation_data = test.map(scale).batch(batch)});
}
