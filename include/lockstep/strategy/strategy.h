// Strategies: where variables live, on which replicas a step runs, and how gradients are summed. Follows
// tf.distribute.Strategy.
//
// A Strategy is a shared handle. One thread at a time uses it. The thread that calls `run` is replica 0's, so from then
// on LibTorch's operators use threads_per_replica threads in it; each other replica has a thread of the strategy's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/data/dataset.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/strategy/compiled.h"
#include "lockstep/strategy/distributed_dataset.h"
#include "lockstep/strategy/replica_values.h"
#include "lockstep/strategy/replicated.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

class StrategyImpl;

namespace internal {
struct Unwrap;  // the library's own
}

// Tells a step function of the replica that it runs on. Lives as long as the call; used by its thread alone.
class ReplicaContext {
 public:
  ReplicaContext(int local_replica_id, const StrategyImpl& strategy)
      : local_replica_id_(local_replica_id), strategy_(strategy) {}

  // Among the replicas of all workers. Throws InvalidArgument in a step that is compiled, which is the same on all.
  int replica_id() const;
  int local_replica_id() const;  // among this process's; throws it too
  int num_replicas_in_sync() const;
  const std::string& device() const;

  // Collective: every replica must call, with a tensor of the same shape and dtype. The result is a new tensor, equal
  // bit for bit on all, without a gradient. Throws Aborted when another replica failed.
  Tensor all_reduce(ReduceOp op, const Tensor& value) const;

  // Collective: the replicas' tensors one after the other along `axis`, where their sizes may differ. Throws like
  // all_reduce.
  Tensor all_gather(const Tensor& value, std::int64_t axis = 0) const;

  // The Group of all replicas, of this process's, and the deadline for an operation on it that begins now.
  const Group& group() const;
  const Group& local_group() const;
  Deadline deadline() const;

  // From here on, and until the call ends, this replica's random numbers are those of `seed`.
  void seed_random(std::uint64_t seed) const;

 private:
  int local_replica_id_;
  const StrategyImpl& strategy_;
};

// Tells a data set function of the input pipeline that it makes.
struct InputContext {
  int num_input_pipelines = 1;
  int input_pipeline_id = 0;
  int num_replicas_in_sync = 1;

  // Throws InvalidArgument when the global batch cannot be divided among the replicas.
  std::int64_t get_per_replica_batch_size(std::int64_t global_batch_size) const;
};

// While this lives, models and loops that this thread makes use the strategy; the innermost wins.
class [[nodiscard]] StrategyScope {
 public:
  explicit StrategyScope(std::shared_ptr<StrategyImpl> strategy);
  ~StrategyScope();
  StrategyScope(const StrategyScope&) = delete;
  StrategyScope& operator=(const StrategyScope&) = delete;

 private:
  std::shared_ptr<StrategyImpl> before_;
};

class Strategy {
 public:
  explicit Strategy(std::shared_ptr<StrategyImpl> impl) : impl_(std::move(impl)) {}

  // The strategy of the innermost scope, else a OneDeviceStrategy on the default device.
  static Strategy current();

  StrategyScope scope() const { return StrategyScope(impl_); }
  int num_replicas_in_sync() const;          // of all workers
  int num_local_replicas() const;            // of this process
  std::vector<std::string> devices() const;  // one a replica of this process

  // True where this process writes the logs and checkpoints: worker 0 does, and one that is alone.
  bool is_chief() const;

  // Calls function(ReplicaContext&, args...) on every replica at once and returns what each returned. A replica's
  // function gets its own element of a PerReplica or ReplicatedModule argument. An exception of a replica aborts the
  // others' collective operations and is rethrown here once all have ended; the strategy can be used again.
  //
  // With TPUStrategy the function is traced, with replica 0's arguments, and runs as one program (see `compiled`). It
  // returns nothing, a Tensor, an Example, or pairs and tuples of them, and reads no tensor's values. All replicas'
  // arguments must have the same shapes: InvalidArgument otherwise.
  template <class Function, class... Args>
  auto run(Function&& function, Args&&... args) const;

  // One value from all replicas', in replica order: sum, mean, min, max or product, elementwise, on the device of this
  // worker's first value. Collective over the workers. Throws InvalidArgument, on all workers, where shapes or dtypes
  // differ, and for values that are undefined or sparse. Follows tf.distribute.Strategy.reduce.
  Tensor reduce(ReduceOp op, const PerReplica<Tensor>& values) const;
  double reduce(ReduceOp op, const PerReplica<double>& values) const;

  // The replicas' tensors one after the other along `axis`, on the device of this worker's first one. Collective over
  // the workers. Throws InvalidArgument, on all workers, where the workers' dtypes, or sizes along other dimensions,
  // differ; LibTorch's error where those of one worker's own replicas do. Follows tf.distribute.Strategy.gather.
  Tensor gather(const PerReplica<Tensor>& values, std::int64_t axis = 0) const;

  // Splits each batch of `dataset` among the replicas, in order; sizes differ by one at most, and may be 0. Where
  // several workers train, by the data set's AutoShardPolicy. Follows experimental_distribute_dataset.
  DistributedDataset distribute(const Dataset& dataset) const;

  // Gives each replica a batch of its own from the data set that `function` makes, batched by the size of one replica.
  // Workers whose data end early go on without examples. Follows distribute_datasets_from_function.
  DistributedDataset distribute_from_function(const std::function<Dataset(const InputContext&)>& function) const;

  // One module a replica. `factory` returns a module holder (Net) or a shared_ptr to a module, another one at each
  // call.
  template <class Factory>
  auto replicate(const Factory& factory) const;

  // An optimizer's state for the parameters of `module`.
  ReplicatedOptimizer optimizer(const Optimizer& optimizer, const ReplicatedModule& module) const;

 private:
  friend struct internal::Unwrap;
  void run_on_replicas(const std::function<void(ReplicaContext&)>& function) const;
  bool runs_programs() const;
  std::vector<std::vector<Tensor>> run_program(const internal::StepToRun& step) const;  // [replica][result]
  template <class Result, class Function, class... Args>
  auto run_traced(Function& function, Args&... args) const;
  std::shared_ptr<StrategyImpl> impl_;
};

// Everything on one device: "cpu:0" (all cores that this process may use), "cuda:0", or empty for the first GPU, else
// the CPU.
class OneDeviceStrategy : public Strategy {
 public:
  explicit OneDeviceStrategy(const std::string& device = "", int threads = 0);  // threads: 0, or as MirroredOptions
};

// How MirroredStrategy reduces gradients; names as in tf.distribute.
enum class CrossDeviceOps {
  automatic,                     // between GPUs nccl, if all replicas can; else one_pass
  one_pass,                      // in host memory: each replica sums, updates and spreads one slice
  reduction_to_one_device,       // in host memory: ReductionToOneDevice
  hierarchical_copy_all_reduce,  // in host memory: HierarchicalCopyAllReduce
  nccl,                          // NcclAllReduce: between GPUs, while backward runs; each updates its own variables
};

struct MirroredOptions {
  // "cpu:0", "cpu:1", ...: logical CPUs, each a thread with its share of the cores. Empty: one replica a GPU, else one
  // a core.
  std::vector<std::string> devices = {};
  CrossDeviceOps cross_device_ops = CrossDeviceOps::automatic;
  std::string reduce_to_device = {};                // reduction_to_one_device: which; empty: the first
  int threads_per_replica = 0;                      // that LibTorch's operators use; 0: an equal share of the cores
  double timeout_seconds = kDefaultTimeoutSeconds;  // how long a replica waits for the others in a step
};

// A copy of every variable on each device, kept equal bit for bit.
class MirroredStrategy : public Strategy {
 public:
  explicit MirroredStrategy(MirroredOptions options = {});
  explicit MirroredStrategy(int num_replicas);  // that many logical CPUs
};

struct CentralStorageOptions {
  std::vector<std::string> compute_devices = {};    // as MirroredOptions::devices
  int threads_per_replica = 0;                      // as MirroredOptions
  double timeout_seconds = kDefaultTimeoutSeconds;  // as MirroredOptions
};

// Variables once, on the CPU; every replica computes with them.
class CentralStorageStrategy : public Strategy {
 public:
  explicit CentralStorageStrategy(CentralStorageOptions options = {});
};

}  // namespace lockstep

#include "lockstep/strategy/strategy_templates.h"
