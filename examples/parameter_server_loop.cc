// A training loop of your own with parameter servers: the chief schedules steps, and workers compute them.
//   lockstep run --workers 2 --ps 1 build/release/examples/parameter_server_loop
#include <lockstep/lockstep.h>
#include <torch/nn/functional/loss.h>
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
  const ls::ParameterServerStrategy strategy;
  auto [train, test] = ls::datasets::fashion_mnist();
  auto net = strategy.replicate([] { return Net(); });
  const auto optimizer = strategy.optimizer(ls::Adam(), net);

  // All processes make the coordinator and define its steps.
  ls::ClusterCoordinator coordinator(strategy);
  auto batches = coordinator.create_per_worker_dataset([&, data = train](const ls::InputContext& context) {
    const auto seed = static_cast<std::uint64_t>(context.input_pipeline_id);  // each worker in an order of its own
    return data.map(scale).cache().shuffle(10'000, {.seed = seed}).batch(64).repeat();
  });
  coordinator.define("train", [&](const std::vector<at::Tensor>&) {
    auto batch = *batches.local().next();
    const auto losses = strategy.run(
        [&](ls::ReplicaContext& replica, Net& own, const ls::Example& part) {
          const auto loss = torch::nn::functional::cross_entropy(
              own(part.x), part.y, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
          optimizer.minimize(replica, loss, static_cast<double>(part.size()));
          return loss.item<double>() / static_cast<double>(part.size());
        },
        net, batch);
    return std::vector<at::Tensor>{at::scalar_tensor(strategy.reduce(ls::ReduceOp::mean, losses))};
  });

  // The chief runs this; workers compute, and servers serve, until it has ended.
  coordinator.run([&] {
    for (int epoch = 0; epoch < 2; ++epoch) {
      std::vector<ls::RemoteValue> losses;
      for (int step = 0; step < 60'000 / 64; ++step) losses.push_back(coordinator.schedule("train"));
      coordinator.join();
      double loss = 0;
      for (const auto& value : losses) loss += value.fetch()[0].item<double>() / static_cast<double>(losses.size());

      coordinator.pull_variables();
      const at::NoGradGuard no_grad;
      double correct = 0;
      const auto test_data = test.map(scale).batch(1000);
      auto rest = test_data.iterate();
      while (const auto batch = rest.next()) correct += net[0](batch->x).argmax(1).eq(batch->y).sum().item<double>();
      std::cout << "epoch " << epoch + 1 << ": loss " << loss << ", accuracy " << correct / 10'000 << std::endl;
    }
  });
}
