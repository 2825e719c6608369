// How the replicas' gradients are summed for the updater, and how new values reach all copies.
//
// A step, as each replica's thread makes it (GradientPath::apply, but for the first three lines):
//
//   begin_step
//   memory_for   before backward: where backward may write the gradient of a slot
//   add          while backward runs, or after it: the gradient of a slot
//   finish       waits for all replicas and returns the sums
//     Updater::update: the replica updates its shards, of ownership(), in the copies that ownership().writes() names
//   publish      brings the new values to all other copies
//     barrier of the replicas
//   end_step     discards the gradients
//
//   | implementation            | where the gradients are summed                                                 |
//   | Direct                    | between the replicas of this process, by the owner, where autograd left them   |
//   | Mapped                    | between the replicas of all processes, which share memory, otherwise as Direct |
//   | Bucketed                  | between processes, or GPUs, in buckets, while backward runs; the state may be  |
//   |                           | divided                                                                        |
//   | strategy::ServerReduction | at servers, which also update                                                  |
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "gradient/ownership.h"
#include "lockstep/collective/group.h"

namespace lockstep::gradient {

// The sums of one step. The tensors belong to the reduction, and are valid until end_step.
struct Sums {
  double weight = 0;      // of all replicas
  double divided_by = 1;  // what the sums are divided by already
  bool finite = true;     // whether all gradients are, where that was checked

  // [part][slot]: contiguous tensors of a slot's elements, undefined where a part has no gradient. In the shards that
  // this process owns, or has copies of, the parts add up to the sum, in their order.
  std::span<const std::span<const at::Tensor>> parts;

  // The ranks that have the other shards, where each replica updates its own shards of its own copy; else null.
  const Communicator* owners = nullptr;
};

// `replicas` is the Group of this process's replicas. Where a comment does not say otherwise, each replica's thread
// makes the call, several at once.
//
// Gradients and sums are tensors on any device, and no call takes or returns a pointer. `add`, `finish` and `publish`
// may return as soon as their work is enqueued on the current streams of the tensors' devices. Who reads the tensors
// enqueues on these streams too. The numbers in Sums are the host's: they are right when `finish` returns.
class Reduction {
 public:
  virtual ~Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  // Which elements this process updates. The object stays; its value changes in `prepare` alone.
  const Ownership& ownership() const { return ownership_; }

  // True where gradients are added while backward runs; a barrier of the replicas then follows end_step. Else they are
  // added after backward. Constant.
  bool during_backward() const { return during_backward_; }

  // The device on which the replica's gradients are added. Constant between calls of `prepare`.
  virtual at::Device device(int /*replica*/) const { return at::kCPU; }

  // Before the first step, and again after the processes' Communicator has got another Group: a step may have broken
  // off, and the next one is made with the new Group. Collective over the processes that train together. One thread,
  // between steps.
  virtual void prepare() {}

  // Begins a step, before its first gradient. Collective over the replicas.
  virtual void begin_step(int /*replica*/) {}

  // Memory in the parameter's shape into which backward may write the replica's gradient of the slot, which saves a
  // copy; undefined where there is none. A gradient may lie elsewhere too. Called before the step's only backward.
  virtual at::Tensor memory_for(int /*replica*/, std::size_t /*slot*/) const { return {}; }

  // The replica's gradient of a slot: contiguous, and not written until the step ends; undefined where the replica has
  // none. Each replica calls it once a step for each slot that was trainable when the reduction was made.
  virtual void add(int replica, std::size_t slot, const at::Tensor& gradient) = 0;

  // After the replica's last `add`, with the weight of its gradients. Returns the sums when all replicas have called
  // it, and so all their backwards have succeeded. From there on only Groups throw.
  virtual Sums finish(const Group& replicas, double weight, bool check_finite, Deadline deadline) = 0;

  // After the replica's update. All copies are equal after it and a barrier.
  virtual void publish(const Group& /*replicas*/, Deadline /*deadline*/) {}

  // Ends the step for the replica: its gradients may be discarded. Called after all replicas have read the sums, or
  // where the step broke off before. The gradients of a step that broke off must not be in the sums of the next one.
  enum class StepEnd { complete, broken_off };
  virtual void end_step(int replica, StepEnd end) = 0;

  // True, once, where the last update used sums that failed later: values may be of no step. One thread, in a step.
  bool take_lost_update() { return lost_update_.exchange(false); }

  // A checkpoint keeps a State, so that sums have the same bits after a restart. `order`: slots in the order in which
  // rank 0's first step made their gradients. `weight_scale`: the running one. Empty before the first step. Restored on
  // all processes, by one thread between steps.
  struct State {
    std::vector<std::int64_t> order;
    double weight_scale = 0;
  };
  virtual State state() const { return {}; }
  virtual void restore(const State& /*state*/) {}

 protected:
  Reduction(Ownership ownership, bool during_backward)
      : ownership_(std::move(ownership)), during_backward_(during_backward) {}

  Ownership ownership_;
  std::atomic<bool> lost_update_ = false;

 private:
  const bool during_backward_;
};

}  // namespace lockstep::gradient
