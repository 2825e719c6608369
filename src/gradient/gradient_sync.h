// How the gradients of replicas reach those who update, and how new values reach all copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "gradient/shard_map.h"
#include "lockstep/collective/group.h"

namespace lockstep::gradient {

// The gradients of one step, summed. Each replica's thread hands over its gradients, calls finish, and after a barrier
// of all replicas wait; then sums may be read until end_step. `replicas` is the Group of this process's replicas.
class GradientSync {
 public:
  virtual ~GradientSync() = default;

  // Once, before the first step. Collective over the processes that train together.
  virtual void prepare() {}

  // Which elements this process updates, and by which replicas. After `prepare`.
  virtual ShardMap shards() const = 0;

  // Whether gradients are wanted as backward makes them, and in host memory. Constant after `prepare`.
  virtual bool during_backward() const { return false; }

  // Memory for the replica's gradient of the slot, in the parameter's shape, from which it need not be copied any more;
  // undefined where there is none. Gradients elsewhere are as good. Before the step's only backward.
  virtual at::Tensor memory_for(int /*replica*/, std::size_t /*slot*/) const { return {}; }

  // Whether gradients of the slot are used.
  virtual bool takes(std::size_t slot) const = 0;

  // A replica's gradient of a slot: contiguous, and not written until the step ends. At most once a step.
  virtual void on_ready(int replica, std::size_t slot, const at::Tensor& gradient) = 0;
  virtual bool is_ready(int replica, std::size_t slot) const = 0;

  // The replica has no gradients of the slots that are left, and counts with `weight`.
  virtual void finish(int replica, double weight, bool check_finite) = 0;

  // Returns when all sums are there.
  virtual void wait(const Group& replicas, Deadline deadline) = 0;

  // --- after it

  struct Totals {
    double weight = 0;      // of all replicas
    double divided_by = 1;  // what the sums are divided by already
    bool finite = true;     // all gradients, where that was to be checked
  };
  virtual Totals totals() const = 0;

  // Tensors of the slot's elements, whose sum is that of the gradients, in the shards of this process; none where
  // nobody has one.
  virtual std::vector<const at::Tensor*> sources(std::size_t slot) const = 0;

  // Each becomes its sum over all owners of shards; the same bits on all. By all replicas.
  virtual void sum_over_owners(std::span<double> values, const Group& replicas, Deadline deadline) const {
    replicas.all_reduce(buffer_of(values), ReduceOp::sum, deadline);
  }

  // The copies to which new values are written, 0, 1, ...; and how they come to the others. After publish and a barrier
  // all copies are equal.
  virtual int written_copies() const = 0;
  virtual void publish(const Group& /*replicas*/, Deadline /*deadline*/) {}

  // In each replica's thread: all have read the sums, and may forget them. Where gradients are wanted during backward,
  // a barrier of the replicas comes before the next.
  virtual void end_step(int replica) = 0;

  // Forgets what the replica handed over in a step that broke off, where the next may come all the same.
  virtual void forget(int /*replica*/) {}

  // --- between steps

  // What all owners have of a slot, as this process has `own` of it, on rank 0; elsewhere undefined, or the same.
  // Collective over the processes.
  virtual at::Tensor gather_from_owners(std::size_t /*slot*/, const at::Tensor& own) const { return own; }

  // What was learned of how gradients are best sent, for a checkpoint: the order of slots in which rank 0's first step
  // made their gradients, and the running weight scale; where a sum's order is another, its bits may be. Empty before.
  // Restored between steps, on all processes.
  struct Learned {
    std::vector<std::int64_t> order;
    double weight_scale = 0;
  };
  virtual Learned learned() const { return {}; }
  virtual void restore(const Learned& /*learned*/) {}
};

}  // namespace lockstep::gradient
