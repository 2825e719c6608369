// A training loop of your own: strategy.run for each step, reduce for what the replicas found, checkpoints by hand.
#include <lockstep/lockstep.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <iostream>

namespace ls = lockstep;

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    hidden = register_module("hidden", torch::nn::Linear(784, 64));
    output = register_module("output", torch::nn::Linear(64, 10));
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::relu(hidden(x.flatten(1)))); }
  torch::nn::Linear hidden = nullptr, output = nullptr;
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
  auto [train, test] = ls::datasets::fashion_mnist();
  const auto batch = 64 * strategy.num_replicas_in_sync();
  const auto train_data = strategy.distribute(train.map(scale).cache().shuffle(10'000).batch(batch));
  const auto test_data = strategy.distribute(test.map(scale).batch(batch));

  auto net = strategy.replicate([] { return Net(); });
  const auto optimizer = strategy.optimizer(ls::Adam(), net);
  ls::Checkpoint checkpoint({{"net", net.trackable()}, {"optimizer", optimizer.trackable()}});
  ls::CheckpointManager manager(checkpoint, "custom_loop_checkpoints", {.max_to_keep = 2});
  if (manager.restore_or_initialize()) std::cout << "going on from " << manager.latest() << "\n";

  // One step, as each replica makes it with its own copy of the network and its own part of the batch.
  const auto train_step = ls::compiled([&](ls::ReplicaContext& replica, Net& own, const ls::Example& part) {
    const auto loss = torch::nn::functional::cross_entropy(
        own(part.x), part.y, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
    optimizer.minimize(replica, loss, static_cast<double>(part.size()));
    return loss.detach();
  });
  const auto count_correct = ls::compiled([](ls::ReplicaContext&, Net& own, const ls::Example& part) {
    const torch::NoGradGuard no_grad;
    return own(part.x).argmax(1).eq(part.y).sum();
  });

  for (int epoch = 0; epoch < 2; ++epoch) {
    double loss = 0;
    auto batches = train_data.iterate({.epoch = epoch});
    while (auto next = batches.next())
      loss += strategy.reduce(ls::ReduceOp::sum, strategy.run(train_step, net, *next)).item<double>();
    double correct = 0;
    for (auto& next : test_data)
      correct += strategy.reduce(ls::ReduceOp::sum, strategy.run(count_correct, net, next)).item<double>();
    std::cout << "epoch " << epoch + 1 << ": loss " << loss / 60'000 << ", accuracy " << correct / 10'000 << ", saved "
              << manager.save() << "\n";
  }
}
