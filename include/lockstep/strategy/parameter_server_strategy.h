// ParameterServerStrategy: variables live on servers; workers compute steps and need not wait for each other.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/buffer.h"
#include "lockstep/cluster/cluster.h"
#include "lockstep/strategy/strategy.h"

namespace lockstep {

struct ParameterServerOptions {
  // The devices of each worker, as MirroredOptions; empty: one replica a GPU, else one replica that computes on the
  // worker's share of its host's cores.
  std::vector<std::string> devices = {};
  int threads_per_replica = 0;  // as MirroredOptions

  // How many shards a variable is cut into: a Partitioner (lockstep/parameter_server/partitioner.h). Empty: each is
  // one.
  std::function<std::int64_t(std::span<const std::int64_t> shape, DType dtype)> variable_partitioner = {};

  // 2: each shard, and each row of a table, is on two servers, which make the same updates. A server that is lost and
  // started again gets everything from the others, so no update is lost. Costs twice the memory and twice the pushes.
  int replicas_of_shards = 1;

  // false: asynchronous. A step is the work of one worker on one batch; its gradients update the variables as they
  // come. true: all workers compute each step together, each on a part of the batch, and the next step begins with its
  // update.
  bool synchronous = false;
  // Synchronous: how many workers a step does not wait for; their work is then dropped (Chen et al., "Revisiting
  // distributed synchronous SGD", 2016).
  int spare_workers = 0;
  // Asynchronous: how many steps a worker may be ahead of another before it waits; -1: any number. Ho et al., "More
  // effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
  int staleness_bound = -1;

  // DType::bfloat16: float32 gradients are sent so, but to servers on a worker's own host, which read them in shared
  // memory. Updates are made in float32.
  std::optional<DType> gradient_dtype = {};

  // Where the launcher gives processes no types (mpirun, srun, torchrun): the first rank is the chief, the last
  // `num_ps` serve; an evaluator comes after them.
  std::optional<int> num_ps = {};
  bool evaluator = false;

  // How long the chief waits for the next step to finish, and a process for servers in one call.
  double timeout_seconds = kDefaultTimeoutSeconds;
  double start_timeout_seconds = kStartTimeoutSeconds;          // until all processes have come
  double reconnect_timeout_seconds = kReconnectTimeoutSeconds;  // until a process that does not answer is given up

  std::optional<Cluster> cluster = {};  // instead of what the environment says
};

// All processes of the job run the same program: they make the same strategies, models and calls (compile, fit,
// evaluate) in the same order. A process's work in `fit` depends on its role:
//   chief      gives out steps, runs the callbacks, validates, and writes logs and checkpoints;
//   workers    compute the steps: each of its own batch of the data set, which every worker reads;
//   servers    (ps) own the variables, in shards, and update them by the model's optimizer;
//   evaluator  evaluates validation_data with each full checkpoint that the chief writes, and gives the results to the
//              callbacks' on_test_end.
// fit and evaluate return the chief's result in all of them; loops of your own train by a ClusterCoordinator.
// Follows tf.distribute.ParameterServerStrategy.
//
// A worker that is lost costs its step, which another one computes again. Servers and the chief that `lockstep run
// --restarts` starts again go on from the last full checkpoint: give fit the callback BackupAndRestore. With
// `replicas_of_shards = 2` a server needs none.
class ParameterServerStrategy : public Strategy {
 public:
  // Loads the library of parameter servers, and waits for all processes. Throws InvalidArgument for an option that is
  // out of range. Throws ClusterError without that library, and without a chief, a worker and a server. Throws
  // DeadlineExceeded naming the processes that have not come.
  explicit ParameterServerStrategy(ParameterServerOptions options = {});

  std::string task_type() const;  // "chief", "worker", "ps" or "evaluator"
  int task_index() const;         // among the processes of its type
  int num_workers() const;
  int num_ps() const;
};

}  // namespace lockstep
