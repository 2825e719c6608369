// For elastic_loop_test: a loop of its own some of whose workers are lost.
#include <lockstep/lockstep.h>
#include <lockstep/parallel.h>
#include <signal.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#if SIMULATED_GPUS
#include "tests/simulated_gpu/nccl.h"
#endif

namespace ls = lockstep;

namespace {

int number(const char* name, int otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

// All processes get the same net.
torch::nn::Sequential net_of(int units) {
  torch::nn::Sequential net(torch::nn::Linear(6, units), torch::nn::Tanh(), torch::nn::Linear(units, 3));
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  double phase = 0;
  for (auto& parameter : net->parameters()) {
    parameter.copy_(at::sin(at::arange(parameter.numel(), at::kDouble) + phase++).view(parameter.sizes()) / 3);
  }
  return net;
}

std::optional<ls::DiLoCoOptions> diloco_asked_for() {
  const int steps = number("DILOCO", 0);
  return steps > 0 ? std::optional(ls::DiLoCoOptions{.steps = steps}) : std::nullopt;
}

struct Worker {
  ls::Strategy strategy;
  int rank;
};

Worker worker_of(const char* mesh) {
  const ls::ElasticOptions elastic{.min_workers = number("MIN_WORKERS", 1)};
  const bool shards = number("SHARD", 0) == 1;
  if (mesh == nullptr) {
    std::vector<std::string> devices;
    if (number("GPUS", 0) == 1) devices.push_back("cuda:" + std::to_string(number("LOCKSTEP_RANK", 0)));
    const ls::MultiWorkerMirroredStrategy strategy({.devices = devices,
                                                    .threads_per_replica = 1,
                                                    .shard_optimizer_state = shards,
                                                    .elastic = elastic,
                                                    .diloco = diloco_asked_for()});
    return {strategy, strategy.worker_rank()};
  }
  const ls::DeviceMesh ranks({{"data", -1}, {"tensor", std::atoi(mesh)}}, {.elastic = true});
  return {ls::ModelParallelStrategy(ranks, {.plan = {{"0", ls::ColwiseParallel()}, {"2", ls::RowwiseParallel()}},
                                            .shard_optimizer_state = shards,
                                            .elastic = elastic,
                                            .threads_per_replica = 1}),
          ranks.ranks().rank()};
}

}  // namespace

// The environment: EPOCHS of 20 steps of the same batches; STEP_MS of work in each. VICTIM is killed in the step
// numbered STEP, from 0 on, at PLACE: "forward", so many microseconds after its forward pass, or "evaluation" (after
// that step; also ALSO). With PLACE "print" it prints that it is in that step. A worker that joins prints when.
// SHARD=1: the optimizer's state is sharded. FOLDER: for a checkpoint after each epoch, to which it goes back where a
// part of the state is lost. MESH: a mesh of data and of so many ranks for tensors, which print no weights. DILOCO:
// workers train by themselves, and meet after so many steps. GPUS=1: each worker has a
// GPU, and the victim's sums of that step do not end.
int main() {
  try {
    const char* const mesh = std::getenv("MESH");
    const auto worker = worker_of(mesh);
    const auto& strategy = worker.strategy;
    const int rank = worker.rank;
    const bool joins = number("LOCKSTEP_JOIN", 0) == 1;
    const bool is_victim = !joins && (rank == number("VICTIM", -1) || rank == number("ALSO", -1));
    const char* const given = std::getenv("PLACE");
    const std::string place = given == nullptr ? "" : given;
    std::cout << "worker at " << getpid() << std::endl;
    auto net = strategy.replicate([] { return net_of(8); });
    const auto optimizer = strategy.optimizer(ls::Adam({.learning_rate = 0.01}), net);
    const auto x = at::sin(at::arange(240 * 6, at::kDouble)).view({240, 6});
    const auto y = x.cumsum(1).slice(1, 2, 5);
    const auto all =
        ls::Dataset::from_tensor_slices(x, y).with_options({.auto_shard_policy = ls::AutoShardPolicy::data});
    const auto data = strategy.distribute(all.shuffle(240, {.seed = 3}).batch(12));
    const auto tests = strategy.distribute(all.batch(50));

    int forwards = 0;
    std::jthread killer;
    const auto step = [&](ls::ReplicaContext& replica, torch::nn::Sequential& own, const ls::Example& part) {
      usleep(static_cast<unsigned>(number("STEP_MS", 0)) * 1000);
      const auto device = own->parameters()[0].device();
      const auto loss = (own->forward(part.x.to(device)) - part.y.to(device)).square().sum();
      if (forwards++ == number("STEP", -1) && is_victim) {
        if (place == "forward") raise(SIGKILL);
        if (place == "print") std::cout << "step " << number("STEP", -1) << std::endl;
#if SIMULATED_GPUS
        if (number("GPUS", 0) == 1) simulated_nccl_fault("stuck", -1);
#endif
        if (place.find_first_not_of("0123456789") == std::string::npos) {
          killer = std::jthread([&] {
            usleep(static_cast<unsigned>(std::stoi(place)));
            raise(SIGKILL);
          });
        }
      }
      optimizer.minimize(replica, loss, static_cast<double>(part.size()));
      return std::array<double, 2>{loss.item<double>(), static_cast<double>(part.size())};
    };
    const auto evaluate = [&] {
      double sum = 0;
      for (auto& batch : tests) {
        if (is_victim && place == "evaluation" && forwards > number("STEP", -1)) raise(SIGKILL);
        const auto losses = strategy.run(
            [](ls::ReplicaContext&, torch::nn::Sequential& own, const ls::Example& part) {
              const at::NoGradGuard no_grad;
              const auto device = own->parameters()[0].device();
              return (own->forward(part.x.to(device)) - part.y.to(device)).square().sum().item<double>();
            },
            net, batch);
        sum += strategy.reduce(ls::ReduceOp::sum, losses);
      }
      return sum;
    };

    double loss = 0, examples = 0, evaluated = 0;
    std::int64_t epoch = 0;
    {
      ls::ElasticLoop loop(strategy, net, optimizer,
                           {{"loss", ls::track(loss)},
                            {"examples", ls::track(examples)},
                            {"evaluated", ls::track(evaluated)},
                            {"epoch", ls::track(epoch)}});
      bool has_joined = !joins;
      const char* const folder = std::getenv("FOLDER");
      ls::Checkpoint checkpoint({{"net", net.trackable()},
                                 {"optimizer", optimizer.trackable()},
                                 {"loop", loop.trackable()},
                                 {"loss", ls::track(loss)},
                                 {"examples", ls::track(examples)},
                                 {"evaluated", ls::track(evaluated)},
                                 {"epoch", ls::track(epoch)}});
      while (epoch < number("EPOCHS", 3)) {
        try {
          loop.for_each(
              data, [&](auto& batch) { return strategy.run(step, net, batch); },
              [&](const std::array<double, 2>& sums) {
                if (!std::exchange(has_joined, true)) std::cout << "joined at step " << loop.steps() << std::endl;
                loss += sums[0];
                examples += sums[1];
              });
          if (diloco_asked_for()) {
            loop.run([&] {
              optimizer.meet();
              return 0.0;
            });
          }
          evaluated += loop.run(evaluate);
          ++epoch;
          if (folder != nullptr) checkpoint.save(std::string(folder) + "/loop");
        } catch (const ls::StateLost& lost) {
          if (folder == nullptr) throw;
          std::cout << "restores: " << lost.what() << std::endl;
          checkpoint.restore(ls::latest_checkpoint(folder));
        }
      }
    }
    std::cout << std::setprecision(15) << "trained on " << examples << " examples, loss and evaluations and weights "
              << loss << " " << evaluated;
    for (const auto& parameter : mesh == nullptr ? net[0]->parameters() : std::vector<at::Tensor>()) {
      std::cout << " " << parameter.sum().item<double>() << " " << parameter.square().sum().item<double>();
    }
    std::cout << std::endl;
    return 0;
  } catch (const ls::Interrupted&) {
    std::cout << "left" << std::endl;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "failed: " << error.what() << std::endl;
    return 1;
  }
}
