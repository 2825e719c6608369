// The gradients of this process's replicas meet those of the other workers: summed here, gathered in buckets, reduced
// while backward goes on.
//
// After Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 2020.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "gradient/replicated_parameters.h"
#include "gradient/workers.h"

namespace lockstep {

struct WorkerGradientsOptions {
  std::size_t bucket_bytes = 0;              // 0: by the size of the model
  std::size_t first_bucket_bytes = 1 << 20;  // the first is ready first, and should not wait for much
  std::optional<DType> wire;                 // float16 or bfloat16: what float gradients are sent as
  std::int64_t compare_copies_every = 100;   // steps; 0: never
};

// In each step every replica gives its gradients, and finishes; when all have, one thread waits; all read the sums;
// when all have, one thread ends the step.
class WorkerGradients {
 public:
  // For the slots that are trainable now. All workers' parameters are equal, and as many replicas.
  WorkerGradients(const ReplicatedParameters& parameters, Workers workers, WorkerGradientsOptions options);
  ~WorkerGradients();
  WorkerGradients(const WorkerGradients&) = delete;
  WorkerGradients& operator=(const WorkerGradients&) = delete;

  // A replica's gradient of a slot: contiguous, in host memory, not written until the step ends. Each replica's calls
  // come one after the other.
  void give(int replica, std::size_t slot, const at::Tensor& gradient);
  bool given(int replica, std::size_t slot) const { return slots_[slot].given[static_cast<std::size_t>(replica)] != 0; }

  // The replica has no gradients of the slots that are left. Throws what the Group throws.
  void finish(int replica, double weight);

  // Returns when the sums of all workers are there. Throws what the Group throws.
  void wait();
  void end_step();

  // What was learnt: the order of slots in which the chief's first step made their gradients, in which they are sent,
  // and the largest weight of a step. Empty before. Restored between steps, on all workers; an order that is not of
  // these slots is not taken.
  struct Learnt {
    std::vector<std::int64_t> order;
    double usual_weight = 0;
  };
  Learnt learnt() const { return order_known_ ? Learnt{order_, usual_weight_} : Learnt{}; }
  void restore(const Learnt& learnt);

  const WorkerGradientsOptions& options() const { return options_; }
  bool takes(std::size_t slot) const { return !slots_[slot].gradients.empty(); }

  // Of all replicas of all workers; the same bits everywhere.
  double total_weight() const { return totals_[0]; }
  double workers_with_weight() const { return totals_[1]; }

  // What the sums are divided by already: the total weight, where that was known before they were sent.
  double divided_by() const { return divided_by_; }
  bool has_gradient(std::size_t slot) const { return slots_[slot].has_gradient; }
  const at::Tensor& sum(std::size_t slot) const { return slots_[slot].sum; }  // flat
  bool finite() const;                                                        // all sums

 private:
  struct Slot {
    std::size_t bucket = 0;
    at::Tensor sent;                    // flat; a part of the bucket's memory
    at::Tensor sum;                     // the same, or float where 16 bits are sent
    at::Tensor flag;                    // one element of the bucket's
    std::vector<at::Tensor> gradients;  // [replica]
    std::vector<char> given;            // [replica]; written by that replica
    int missing = 0;                    // replicas; guarded by mutex_
    bool has_gradient = false;
  };
  struct Bucket {
    Memory memory;
    Buffer buffer;  // the slots' gradients, then for each slot how many workers have one
    at::Tensor sent, sum, flags;
    std::vector<std::size_t> slots;
    std::shared_ptr<const std::string> names;  // of the slots, for timelines
    std::size_t missing = 0;                   // slots; guarded by mutex_
    bool shortened = false;                    // 16 bits are sent
    std::optional<Work> work;
  };

  void make_buckets();
  void reset();
  void arrive(std::size_t slot);
  void add_up(const Slot& slot);
  void receive(Bucket& bucket);
  static Call reduction(const Bucket& bucket);
  Call tally();

  // float16 has no room for sums over many examples: they are sent divided by the largest weight of a step so far.
  bool scaled() const { return options_.wire == DType::float16; }
  double scale_of(const Bucket& bucket) const {
    return early() && scaled() && bucket.shortened ? usual_weight_ : divided_by_;
  }

  // Whether buckets start as soon as they are whole, and not when all have finished.
  bool early() const { return overlap_ && (!scaled() || usual_weight_ > 0); }

  const ReplicatedParameters& parameters_;
  const Workers workers_;
  const WorkerGradientsOptions options_;
  const bool overlap_;  // whether another thread may reduce while backward goes on
  std::vector<std::int64_t> order_;
  bool order_known_ = false;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;

  Mutex mutex_;
  std::size_t launched_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // buckets
  int unfinished_ LOCKSTEP_GUARDED_BY(mutex_) = 0;        // replicas
  std::vector<std::int64_t> ready_order_ LOCKSTEP_GUARDED_BY(mutex_);

  std::vector<double> weights_;     // [replica]; written by that replica
  std::array<double, 2> totals_{};  // weight, and workers that have any; of this process, until the tally is over
  double usual_weight_ = 0;         // the largest of a step so far; 0 before the first
  double divided_by_ = 1;
  std::optional<Work> tally_;
};

}  // namespace lockstep
