// Sums between processes while backward runs: the gradients of this process's replicas are added up here, and reduced
// over the processes in buckets.
//
// The optimizer's state may be sharded over the processes: each updates its own shards of the parameters.
// Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020: stage 1, with
// gradients that are reduced at their owners only. A bucket is a range of the flat parameters:
//
//   gradients of rank 0   | a0 a1 |                       | v0 |               | v0 v1 |
//   gradients of rank 1   | b0 b1 |  -- reduce_scatter -> | v1 | -- gather --> | v0 v1 |   values, on both
//
// In an elastic job the state of a lost process must not be lost with it. So each process also updates the shards of a
// neighbour, which sends the sums. The neighbour is on another host where possible:
//
//   sums   | v0 |      | v1 |      | v2 |        each sends its own to the next
//   state  | s0 s2 |   | s1 s0 |   | s2 s1 |
//
// Wang et al., "GEMINI: fast failure recovery in distributed training with in-memory checkpoints", SOSP 2023, place
// copies in this way; here the state is not sent, but computed twice. A barrier precedes the update (Updater). So where
// a process is lost after only some have made an update, the others can complete the update by themselves. The values
// of shards are then gathered again, from either of the two that have them (moving_state.h). Without copies, a process
// that is lost between update and gather leaves the others' values partly of this step, and training begins again from
// a checkpoint.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "gradient/buckets.h"
#include "gradient/reduction.h"
#include "gradient/replicated_parameters.h"

namespace lockstep::gradient {

struct BucketedOptions {
  BucketOptions buckets;
  bool sum = false;                                      // updates use the sum over the processes instead of the mean
  bool shard_state = false;                              // each process has state for its own shards alone
  std::function<std::vector<std::string>()> hosts = {};  // of the processes, now, in an elastic job: [rank]; else null
};

class Bucketed final : public Reduction {
 public:
  Bucketed(ReplicatedParameters& parameters, Communicator ranks, BucketedOptions options);

  // Throws InvalidArgument on all processes where models, or the numbers of replicas, differ. Where the state is
  // sharded, puts the first copy of the values into memory of the Group.
  void prepare() override;
  at::Tensor memory_for(int replica, std::size_t slot) const override;
  void add(int replica, std::size_t slot, const at::Tensor& gradient) override;
  Sums finish(const Group& replicas, double weight, bool check_finite, Deadline deadline) override;
  void publish(const Group& replicas, Deadline deadline) override;
  void end_step(int replica, StepEnd end) override;
  State state() const override;
  void restore(const State& state) override;

 private:
  struct Slot {
    std::vector<at::Tensor> gradients;  // [replica]
    int missing = 0;                    // replicas that have not added theirs; guarded by mutex_
  };

  void make_buckets();
  void divide();
  std::size_t place(std::size_t slot) const { return static_cast<std::size_t>(place_[slot]); }
  void start_step();
  void add_up(std::size_t slot);
  void reduce();
  void copy_sums() const;

  // Constant after construction.
  ReplicatedParameters& parameters_;
  const Communicator ranks_;
  const BucketedOptions options_;
  const bool scales_;                   // gradients are divided before they are sent, to have room in 16 bits
  std::vector<std::size_t> trainable_;  // slots, in the order of the buckets' slots
  std::vector<std::int64_t> place_;     // [slot]: in trainable_, or -1

  // Constant between calls of `prepare`; null and empty before the first.
  std::unique_ptr<Buckets> buckets_;
  std::vector<ScatteredBucket> scattered_;  // where the state is sharded

  std::vector<Slot> slots_;
  std::vector<double> weights_;  // [replica]; written by that replica
  double scale_ = 1;             // of this step
  bool scale_known_ = false;     // whether scale_ was known before this step's gradients came
  bool check_finite_ = false;    // in this step; the same on all replicas

  // Written by replica 0 in `finish`.
  std::vector<at::Tensor> means_;           // [slot]: those that have a gradient on any rank
  const std::span<const at::Tensor> part_;  // a view of them
  Sums sums_;

  Mutex mutex_;
  int unfinished_ LOCKSTEP_GUARDED_BY(mutex_) = 0;                // replicas
  std::vector<std::size_t> arrived_ LOCKSTEP_GUARDED_BY(mutex_);  // slots that were ready before the scale was known
};

}  // namespace lockstep::gradient
