// How the replicas' gradients are summed for the updater, and how new values reach all copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "gradient/shard_map.h"
#include "lockstep/collective/group.h"

namespace lockstep::gradient {

// Sums the gradients of one step. Each replica's thread hands over its gradients, calls `finish` and, after a barrier
// of all replicas, `wait`; then the sums may be read until `end_step`. `replicas` is the Group of this process's
// replicas.
class GradientSync {
 public:
  virtual ~GradientSync() = default;

  // Once, before the first step. Collective over the processes that train together.
  virtual void prepare() {}

  // Before a step: brings values that others have updated to all copies. Not while replicas run.
  virtual void fetch(Deadline /*deadline*/) {}

  // The same, but that only what others have changed since the last time moves.
  virtual void fetch_changed(Deadline /*deadline*/) {}

  // After values were set from outside: brings them to whoever updates them. Likewise.
  virtual void store(Deadline /*deadline*/) {}

  // After the processes' Communicator has got another Group, and a step that may have failed: the next one is made with
  // that, with other shards. Collective, between steps.
  virtual void regroup() {}

  // Which elements this process updates, and by which replicas. Constant between regroups, after `prepare`.
  virtual ShardMap shards() const = 0;

  // Which shards of another process this one updates as well, by the same sums.
  virtual ShardMap copies() const { return {}; }

  // Whether processes have other shards of the optimizer's state, which are divided anew after each regroup.
  virtual bool divides_state() const { return false; }

  // Which elements' state each process has, its own and copies: [rank]. Empty for a process alone.
  virtual std::vector<std::vector<Shard>> held() const { return {}; }

  // Whether gradients must be handed over during backward, in host memory. Constant after `prepare`.
  virtual bool during_backward() const { return false; }

  // Memory in the parameter's shape into which backward may write the replica's gradient of the slot, which saves a
  // copy; undefined where there is none. Gradients may lie elsewhere too. Called before the step's only backward.
  virtual at::Tensor memory_for(int /*replica*/, std::size_t /*slot*/) const { return {}; }

  // Whether gradients of the slot are used.
  virtual bool takes(std::size_t slot) const = 0;

  // A replica's gradient of a slot: contiguous, and not written until the step ends. At most once a step.
  virtual void on_ready(int replica, std::size_t slot, const at::Tensor& gradient) = 0;
  virtual bool is_ready(int replica, std::size_t slot) const = 0;

  // Ends the replica's part, with its weight: it has no gradients for the remaining slots.
  virtual void finish(int replica, double weight, bool check_finite) = 0;

  // Returns when all sums are there.
  virtual void wait(const Group& replicas, Deadline deadline) = 0;

  // --- after `wait`

  struct Totals {
    double weight = 0;      // of all replicas
    double divided_by = 1;  // what the sums are divided by already
    bool finite = true;     // whether all gradients are, where that was checked
  };
  virtual Totals totals() const = 0;

  // Tensors of the slot's elements that add up to the sum of gradients in the shards of this process; none where no
  // replica has a gradient.
  virtual std::vector<const at::Tensor*> sources(std::size_t slot) const = 0;

  // Replaces each value by its sum over all owners of shards, with the same bits on all. Called by all replicas.
  virtual void sum_over_owners(std::span<double> values, const Group& replicas, Deadline deadline) const {
    replicas.all_reduce(buffer_of(values), ReduceOp::sum, deadline);
  }

  // The flat buffers to which the updater writes new values: first one of this process, whose old values it reads.
  // `publish` brings them to the other copies. After publish and a barrier all copies are equal.
  virtual std::span<const at::Tensor> written(at::ScalarType dtype) const = 0;
  virtual void publish(const Group& /*replicas*/, Deadline /*deadline*/) {}

  // The same between steps, by one thread.
  virtual void publish_between_steps() {}

  // Called in each replica's thread once all replicas have read the sums, which may then be discarded. Where
  // `during_backward`, a barrier of the replicas follows before the next step.
  virtual void end_step(int replica) = 0;

  // Discards what the replica handed over in a step that failed, where another step may follow.
  virtual void forget(int /*replica*/) {}

  // --- between steps

  // Gathers a slot from all owners on rank 0; `own` is this process's shard. The result elsewhere is undefined, or the
  // same. Collective over the processes.
  virtual at::Tensor gather_from_owners(std::size_t /*slot*/, const at::Tensor& own) const { return own; }

  // What a checkpoint keeps so that sums have the same bits after a restart: the order of slots in which rank 0's first
  // step made their gradients, and the running weight scale. Empty before the first step. Restored between steps, on
  // all processes.
  struct State {
    std::vector<std::int64_t> order;
    double weight_scale = 0;
  };
  virtual State state() const { return {}; }
  virtual void restore(const State& /*state*/) {}
};

}  // namespace lockstep::gradient
