// For parameter_server_faults_test: a training whose weights tell which steps were applied, and how often.
#include <lockstep/lockstep.h>
#include <signal.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <thread>

namespace {

int number(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? 0 : std::atoi(value);
}

// SGD whose updates of a shard take UPDATE_MS.
struct SlowSGD final : lockstep::SpanRule<SlowSGD> {
  std::string name() const override { return "slow_sgd"; }
  std::vector<lockstep::StateSpec> states() const override { return {}; }
  template <class T>
  void apply(const lockstep::UpdateStep& step, std::span<T> value, std::span<const T> gradient,
             std::span<T* const>) const {
    usleep(static_cast<unsigned>(number("UPDATE_MS")) * 1000);
    for (std::size_t i = 0; i < value.size(); ++i) value[i] -= T(step.learning_rate) * gradient[i];
  }
};

// Steps that the chief schedules: each adds its number. With BACKUP the loop saves a checkpoint after every 20.
void run_steps(const lockstep::ParameterServerStrategy& strategy, int steps, int work) {
  auto net = strategy.replicate([] {
    torch::nn::Linear made(torch::nn::LinearOptions(1, 1).bias(false));
    const at::NoGradGuard no_grad;
    made->to(torch::kDouble);
    made->weight.zero_();
    return made;
  });
  const auto optimizer = strategy.optimizer(lockstep::SGD({.learning_rate = 1}), net);
  lockstep::ClusterCoordinator coordinator(strategy);
  coordinator.define("add", [&](const std::vector<at::Tensor>& arguments) {
    strategy.run(
        [&](lockstep::ReplicaContext& replica, torch::nn::Linear& own) {
          usleep(static_cast<unsigned>(work) * 1000);
          optimizer.minimize(replica, -(own->weight * arguments.at(0)).sum(), 1);
          return 0;
        },
        net);
    return arguments;
  });
  coordinator.run([&] {
    std::int64_t done = 0;
    const char* const folder = std::getenv("BACKUP");
    lockstep::Checkpoint checkpoint(
        {{"net", net.trackable()}, {"optimizer", optimizer.trackable()}, {"done", lockstep::track(done)}});
    lockstep::CheckpointManager manager(checkpoint, folder == nullptr ? "" : folder);
    if (folder != nullptr) manager.restore_or_initialize();
    std::vector<lockstep::RemoteValue> values;
    while (done < steps) {
      values.push_back(coordinator.schedule("add", {at::scalar_tensor(++done, at::kDouble)}));
      if (folder == nullptr || done % 20 != 0) continue;
      coordinator.join();
      manager.save();
      if (done == 20) std::cout << "saved" << std::endl;
    }
    coordinator.join();
    double returned = 0;
    for (const auto& value : values) returned += value.fetch()[0].item<double>();
    coordinator.pull_variables();
    std::cout << "returned " << returned << ", added " << net[0]->weight.item<double>() << std::endl;
  });
}

}  // namespace

// Arguments: epochs, milliseconds of work in a step, and a worker and the step of its own in which it gets a signal,
// unless it was started again. The environment's BACKUP: a folder for checkpoints, one every 20 steps. COPIES: of each
// shard. SYNCHRONOUS: workers compute steps together. COORDINATOR: the steps are scheduled by a ClusterCoordinator
// instead. NUM_PS: servers, where the launcher does not tell. UPDATE_MS: how long the update of a shard takes.
// SIGNAL_AFTER_MS: the signal comes so long after the forward pass.
int main(int argc, char** argv) {
  const int epochs = std::atoi(argv[1]), work = std::atoi(argv[2]);
  const int victim = argc > 3 ? std::atoi(argv[3]) : -1, at = argc > 4 ? std::atoi(argv[4]) : 0;
  const int signal = argc > 5 ? std::atoi(argv[5]) : SIGKILL;
  try {
    const lockstep::ParameterServerStrategy strategy(
        {.threads_per_replica = 1,
         .variable_partitioner = lockstep::FixedShardsPartitioner(2),
         .replicas_of_shards = std::max(1, number("COPIES")),
         .synchronous = number("SYNCHRONOUS") != 0,
         .num_ps = std::getenv("NUM_PS") == nullptr ? std::optional<int>() : number("NUM_PS")});
    std::cout << strategy.task_type() << " " << strategy.task_index() << " at " << getpid() << std::endl;
    if (number("COORDINATOR") != 0) {
      run_steps(strategy, 50 * epochs, work);
      return 0;
    }
    const bool is_victim =
        strategy.task_type() == "worker" && strategy.task_index() == victim && number("LOCKSTEP_RESTART") == 0;
    int steps = 0;
    std::jthread signaller;
    // Batch i is the unit vector e_i, and the gradient of -(W e_i + b) is -1 at column i of W and in b. So each row of
    // W, which is a shard, counts its updates by each batch, and b counts all updates.
    const auto loss = [&](const at::Tensor&, const at::Tensor& out) {
      usleep(static_cast<unsigned>(work) * 1000);
      if (++steps == at && is_victim) {
        signaller = std::jthread([signal] {
          usleep(static_cast<unsigned>(number("SIGNAL_AFTER_MS")) * 1000);
          raise(signal);
        });
        if (number("SIGNAL_AFTER_MS") == 0) signaller.join();
      }
      return -out.sum(1);
    };
    const auto data =
        lockstep::Dataset::from_tensor_slices(at::eye(50, at::kDouble), at::zeros({50, 1}, at::kDouble)).batch(1);
    const auto scope = strategy.scope();
    lockstep::Sequential model({lockstep::Dense(2, {.kernel_initializer = "zeros"})});
    const lockstep::Optimizer optimizer(std::make_shared<SlowSGD>(), {.learning_rate = 1});
    model.compile({.optimizer = optimizer, .loss = lockstep::Loss("minus", loss)});
    std::vector<lockstep::AnyCallback> callbacks{
        lockstep::LambdaCallback({.on_train_batch_end = [&](std::int64_t batch, const lockstep::Logs&) {
          if (batch == 0) std::cout << "trains" << std::endl;
        }})};
    if (const char* const folder = std::getenv("BACKUP")) {
      callbacks.emplace_back(lockstep::BackupAndRestore(folder, {.save_freq = 20}));
    }
    model.fit(data, {.epochs = epochs, .verbose = 0, .callbacks = callbacks});
    if (!strategy.is_chief()) return 0;
    const auto outputs = [&](const at::Tensor& x) {
      return model.predict(lockstep::Dataset::from_tensor_slices(x).batch(1));
    };
    const auto bias = outputs(at::zeros({1, 50}, at::kDouble));
    const auto counts = outputs(at::eye(50, at::kDouble)) - bias;
    std::cout << "steps " << model.iterations() << ", updates by a batch " << counts.min().item<double>() << " to "
              << counts.max().item<double>() << ", of a shard " << bias[0][0].item<double>() << " "
              << bias[0][1].item<double>() << std::endl;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "failed: " << error.what() << std::endl;
    return 1;
  }
}
