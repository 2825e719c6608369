// The gradients of this process's replicas, summed here and reduced over the workers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "gradient/buckets.h"
#include "gradient/replicated_parameters.h"

namespace lockstep {

struct WorkerGradientsOptions {
  BucketOptions buckets;
  std::int64_t compare_copies_every = 100;  // steps; 0: never
};

// In each step every replica gives its gradients, and finishes; when all have, one thread waits; all read the sums;
// when all have, one thread ends the step.
class WorkerGradients {
 public:
  // For the slots that are trainable now. All workers' parameters are equal, and as many replicas. Collective.
  WorkerGradients(const ReplicatedParameters& parameters, const Communicator& workers,
                  const WorkerGradientsOptions& options);

  // A replica's gradient of a slot: contiguous, in host memory, not written until the step ends. Each replica's calls
  // come one after the other.
  void give(int replica, std::size_t slot, const at::Tensor& gradient);
  bool given(int replica, std::size_t slot) const { return slots_[slot].given[static_cast<std::size_t>(replica)] != 0; }

  // The replica has no gradients of the slots that are left. Throws what the Group throws.
  void finish(int replica, double weight);

  // Returns when the sums of all workers are there. Throws what the Group throws.
  void wait();
  void end_step();

  // What was learned: the order of slots in which the chief's first step made their gradients, in which they are sent,
  // and the running weight scale. Empty before. Restored between steps, on all workers.
  struct Learned {
    std::vector<std::int64_t> order;
    double weight_scale = 0;
  };
  Learned learned() const;
  void restore(const Learned& learned);

  std::int64_t compare_copies_every() const { return compare_copies_every_; }
  bool takes(std::size_t slot) const { return place_[slot] >= 0; }

  // Of all replicas of all workers; the same bits everywhere.
  double total_weight() const { return buckets_->weights().total(); }
  double workers_with_weight() const { return buckets_->weights().ranks_with_weight(); }

  // What the sums are divided by already.
  double divided_by() const { return scale_ * buckets_->ranks().size(); }
  bool has_gradient(std::size_t slot) const { return buckets_->has_gradient(place(slot)); }
  const at::Tensor& sum(std::size_t slot) const { return buckets_->mean(place(slot)); }  // flat
  bool finite() const { return buckets_->all_finite(); }                                 // all sums

 private:
  struct Slot {
    std::vector<at::Tensor> gradients;  // [replica]
    std::vector<char> given;            // [replica]; written by that replica
    int missing = 0;                    // replicas; guarded by mutex_
  };

  std::size_t place(std::size_t slot) const { return static_cast<std::size_t>(place_[slot]); }
  void start_step();
  void arrive(std::size_t slot);
  void add_up(std::size_t slot);

  // Constant after construction.
  const int replicas_;
  const std::int64_t compare_copies_every_;
  std::vector<std::size_t> trainable_;  // slots, in the order of the buckets' slots
  std::vector<std::int64_t> place_;     // [slot]: in trainable_, or -1
  std::unique_ptr<Buckets> buckets_;

  std::vector<Slot> slots_;
  std::vector<double> weights_;  // [replica]; written by that replica
  double scale_ = 1;             // of this step
  bool scale_known_ = false;     // before this step's gradients came

  Mutex mutex_;
  int unfinished_ LOCKSTEP_GUARDED_BY(mutex_) = 0;                // replicas
  std::vector<std::size_t> arrived_ LOCKSTEP_GUARDED_BY(mutex_);  // slots, before the scale is known
};

}  // namespace lockstep
