// One rank of a Bucketed reduction: the gradients of its replicas are added up, and reduced over the ranks in buckets
// while backward runs.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "gradient/buckets.h"
#include "gradient/reduction.h"
#include "gradient/replicated_parameters.h"

namespace lockstep::gradient {

// Which replicas are a rank, and the ranks.
struct ReplicasOfRank {
  Communicator ranks;
  int first = 0, count = 1;
};

// Each replica's thread calls `add`, `announce` and `reduce`; one thread everything else, while no replica is in a
// step.
class BucketedRank {
 public:
  // `sum`: updates use the sum over the ranks instead of the mean.
  BucketedRank(ReplicatedParameters& parameters, ReplicasOfRank who, BucketOptions options, bool sum);

  const Communicator& ranks() const { return who_.ranks; }
  int first_replica() const { return who_.first; }

  // The device of the sums: the replica's GPU where each rank is one replica that has its values on a GPU, and the
  // ranks reach each other's; else the CPU. The CPU before make_buckets.
  at::Device device() const { return device_; }

  // Null before make_buckets.
  Buckets* buckets() { return buckets_.get(); }
  const Buckets* buckets() const { return buckets_.get(); }

  // Collective over the ranks. Makes the buckets, or makes them anew where the Communicator has got another Group.
  void make_buckets();

  void start_step();

  // False after a step that broke off with gradients, until make_buckets has begun anew.
  bool is_clean() const { return is_clean_; }
  at::Tensor memory_for(int replica, std::size_t slot) const;
  void add(int replica, std::size_t slot, const at::Tensor& gradient);

  // Tells the weight of the replica's gradients. The last replica of this rank announces their sum to the other ranks.
  void announce(int replica, double weight, bool check_finite);

  // Waits for the sums. Called by one of the rank's replicas after all have announced their weights.
  void reduce();
  const Sums& sums() const { return sums_; }

  // A call by which the rank gets values of the update.
  void remember(Work gathering) {
    if (last_update_) last_update_->calls.push_back(std::move(gathering));
  }

  // True, once, where the last update was enqueued with sums, or values, of calls on a GPU that failed later.
  bool take_lost_update() { return std::exchange(lost_update_, false); }

  // Ends a step that is complete. Collective over the ranks in the first step.
  void end_step();

  Reduction::State state() const;
  void restore(const Reduction::State& state);

  const std::vector<std::size_t>& trainable() const { return trainable_; }  // slots, in the order of the buckets' slots

 private:
  struct Slot {
    std::vector<at::Tensor> gradients;  // [replica of this rank]
    int missing = 0;                    // replicas that have not added theirs; guarded by mutex_
  };

  std::size_t place(std::size_t slot) const { return static_cast<std::size_t>(place_[slot]); }
  std::size_t number(int replica) const { return static_cast<std::size_t>(replica - who_.first); }
  void add_up(std::size_t slot);
  void sum_on_host(const std::vector<at::Tensor>& gradients, const at::Tensor& sum) const;
  void look_at_last_update();
  void sum_on_gpu(const at::Tensor& gradient, at::Tensor sum) const;

  // Constant after construction.
  ReplicatedParameters& parameters_;
  const ReplicasOfRank who_;
  const BucketOptions options_;
  const bool sum_;
  const bool scales_;                   // gradients are divided before they are sent, to have room in 16 bits
  std::vector<std::size_t> trainable_;  // as trainable()
  std::vector<std::int64_t> place_;     // [slot]: in trainable_, or -1

  // Made by make_buckets.
  at::Device device_ = at::kCPU;
  std::unique_ptr<Buckets> buckets_;

  std::vector<Slot> slots_;
  std::vector<double> weights_;  // [replica of this rank]; written by that replica
  double scale_ = 1;             // of this step
  bool scale_known_ = false;     // whether scale_ was known before this step's gradients came
  bool check_finite_ = false;    // in this step; the same on all replicas
  std::atomic<bool> is_clean_ = true;

  // The calls on a GPU whose results the last update used.
  struct LastUpdate {
    Group group;
    std::vector<Work> calls;
  };
  std::optional<LastUpdate> last_update_;
  bool lost_update_ = false;

  // Written in `reduce`.
  std::vector<at::Tensor> means_;           // [slot]: those that have a gradient on any rank
  const std::span<const at::Tensor> part_;  // a view of them
  Sums sums_;

  Mutex mutex_;
  int unfinished_ LOCKSTEP_GUARDED_BY(mutex_) = 0;                // replicas
  std::vector<std::size_t> arrived_ LOCKSTEP_GUARDED_BY(mutex_);  // slots that were ready before the scale was known
};

}  // namespace lockstep::gradient
