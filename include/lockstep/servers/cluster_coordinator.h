// ClusterCoordinator: a training loop of your own with parameter servers. The chief schedules steps by name, and
// workers compute them. Follows tf.distribute.coordinator.ClusterCoordinator.
//
//   const ParameterServerStrategy strategy;
//   auto net = strategy.replicate([] { return Net(); });
//   const auto optimizer = strategy.optimizer(Adam(), net);
//   ClusterCoordinator coordinator(strategy);
//   auto batches = coordinator.create_per_worker_dataset([&](const InputContext&) { return data.batch(64).repeat(); });
//   coordinator.define("train", [&](const std::vector<Tensor>&) {
//     const auto losses = strategy.run(train_step, net, *batches.local().next());
//     return std::vector<Tensor>{at::scalar_tensor(strategy.reduce(ReduceOp::sum, losses))};
//   });
//   coordinator.run([&] {
//     for (int i = 0; i < 1000; ++i) coordinator.schedule("train");
//     coordinator.join();
//   });
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/strategy/parameter_server_strategy.h"

namespace lockstep {

namespace parameter_server {
class StepQueue;
struct StepResult;
}  // namespace parameter_server

// The result of a scheduled step. A shared handle; any thread.
class RemoteValue {
 public:
  // Waits for the result. Throws what `ClusterCoordinator::fetch` throws.
  std::vector<Tensor> fetch() const;

 private:
  friend class ClusterCoordinator;
  RemoteValue(std::shared_ptr<parameter_server::StepQueue> queue, std::shared_ptr<parameter_server::StepResult> result,
              double step_seconds)
      : queue_(std::move(queue)), result_(std::move(result)), step_seconds_(step_seconds) {}
  std::shared_ptr<parameter_server::StepQueue> queue_;
  std::shared_ptr<parameter_server::StepResult> result_;
  double step_seconds_ = 0;
};

// A value of each worker's own. A shared handle; one thread.
template <class Value>
class PerWorkerValues {
 public:
  explicit PerWorkerValues(std::function<Value()> make) : make_(std::move(make)) {}

  // This worker's value, in a step. The value is made at the first call, also in a worker that was started again.
  Value& local() {
    if (!*value_) value_->emplace(make_());
    return **value_;
  }

 private:
  std::function<Value()> make_;
  std::shared_ptr<std::optional<Value>> value_ = std::make_shared<std::optional<Value>>();
};

// All processes make the same coordinator and the same calls of define and run, in the same order.
//
// A step is computed by one worker. The step begins with the servers' values of all variables that strategy.optimizer
// was called for, and updates each at most once (minimize or apply_gradients). Its updates have its number, by which a
// server knows one that it has already. So the step of a worker that was lost is computed again by another one, and
// counts once. Modules' buffers and frozen parameters are each process's own.
class ClusterCoordinator {
 public:
  // Throws InvalidArgument for a strategy that is synchronous or has a staleness bound.
  explicit ClusterCoordinator(const ParameterServerStrategy& strategy);

  // A worker's work for a step: gets the tensors that the step was scheduled with, returns CPU tensors or others.
  using Step = std::function<std::vector<Tensor>(const std::vector<Tensor>& arguments)>;

  // Throws InvalidArgument for a name that is defined already.
  void define(const std::string& name, Step step);

  // On the chief calls `program`; in all other processes returns when it has ended, or throws Error with what it threw.
  // Workers compute the steps that it schedules. Throws InvalidArgument for a run within a run.
  void run(const std::function<void()>& program);

  // --- in `program`; any thread

  // Returns at once, unless many steps wait (256 a worker). Throws InvalidArgument for a step that is not defined, and,
  // like `join`, for an earlier step that failed.
  RemoteValue schedule(const std::string& name, const std::vector<Tensor>& arguments = {});

  // Waits until all scheduled steps have ended. Throws Error with what the first step threw that failed since the last
  // time; the steps that no worker had begun then are cancelled. Throws ClusterError when all workers are lost, and
  // DeadlineExceeded when no step has ended for the strategy's timeout_seconds.
  void join();

  // True where all steps have ended.
  bool done() const;

  // Waits for the step, and returns its result as CPU tensors, of 256 MiB at most. Throws Error with what the step
  // threw, Aborted where it was cancelled, and what `join` throws.
  std::vector<Tensor> fetch(const RemoteValue& value) const { return value.fetch(); }

  // Brings the servers' values to the modules of this process: for evaluation, and before their trackable is saved. One
  // thread, while no step runs here.
  void pull_variables();

  // --- for steps

  // `make(context)` makes a data set of batches of the size of one replica; `context` has the worker's number among
  // all. Each worker walks its own.
  PerWorkerValues<DistributedIterator> create_per_worker_dataset(
      const std::function<Dataset(const InputContext&)>& make) const;

  template <class Value>
  PerWorkerValues<Value> create_per_worker_values(std::function<Value()> make) const {
    return PerWorkerValues<Value>(std::move(make));
  }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep
