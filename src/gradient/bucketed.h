// The gradients of this process's replicas, summed here and reduced over the processes in buckets.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "gradient/buckets.h"
#include "gradient/gradient_sync.h"
#include "gradient/replicated_parameters.h"

namespace lockstep::gradient {

class Bucketed : public GradientSync {
 public:
  // `sum`: updates use the sum over the processes instead of the mean.
  Bucketed(const ReplicatedParameters& parameters, Communicator ranks, BucketOptions options, bool sum);

  // Throws InvalidArgument on all processes where models, or the numbers of replicas, differ.
  void prepare() override;
  void regroup() override;
  ShardMap shards() const override { return ShardMap::even(parameters_.trainable(), parameters_.replicas()); }
  std::vector<std::vector<Shard>> held() const override {
    return std::vector(static_cast<std::size_t>(ranks_.size()), parameters_.trainable());
  }
  bool during_backward() const override { return true; }
  at::Tensor memory_for(int replica, std::size_t slot) const override;
  bool takes(std::size_t slot) const override { return place_[slot] >= 0; }
  void on_ready(int replica, std::size_t slot, const at::Tensor& gradient) override;
  bool is_ready(int replica, std::size_t slot) const override {
    return slots_[slot].given[static_cast<std::size_t>(replica)] != 0;
  }
  void finish(int replica, double weight, bool check_finite) override;
  void wait(const Group& replicas, Deadline deadline) override;
  Totals totals() const override { return totals_; }
  std::vector<const at::Tensor*> sources(std::size_t slot) const override;
  std::span<const at::Tensor> written(at::ScalarType dtype) const override { return parameters_.flats(dtype); }
  void end_step(int replica) override;

  State state() const override;
  void restore(const State& state) override;

 protected:
  const Communicator& ranks() const { return ranks_; }
  const Buckets& buckets() const { return *buckets_; }
  std::size_t slot_of(std::size_t place) const { return trainable_[place]; }
  virtual void reduce();

 private:
  struct Slot {
    std::vector<at::Tensor> gradients;  // [replica]
    std::vector<char> given;            // [replica]; written by that replica
    int missing = 0;                    // replicas that are not ready; guarded by mutex_
  };

  std::size_t place(std::size_t slot) const { return static_cast<std::size_t>(place_[slot]); }
  void start_step();
  void arrive(std::size_t slot);
  void add_up(std::size_t slot);

  // Constant after `prepare`.
  const ReplicatedParameters& parameters_;
  const Communicator ranks_;
  const BucketOptions options_;
  const bool sum_;
  const bool scales_;                   // gradients are divided before they are sent, to have room in 16 bits
  std::vector<std::size_t> trainable_;  // slots, in the order of the buckets' slots
  std::vector<std::int64_t> place_;     // [slot]: in trainable_, or -1
  std::unique_ptr<Buckets> buckets_;    // null before `prepare`

  std::vector<Slot> slots_;
  std::vector<double> weights_;  // [replica]; written by that replica
  double scale_ = 1;             // of this step
  bool scale_known_ = false;     // whether it was, before this step's gradients came
  bool check_finite_ = false;    // in this step; the same on all replicas
  Totals totals_;

  Mutex mutex_;
  int unfinished_ LOCKSTEP_GUARDED_BY(mutex_) = 0;                // replicas
  std::vector<std::size_t> arrived_ LOCKSTEP_GUARDED_BY(mutex_);  // slots that were ready before the scale was known
};

}  // namespace lockstep::gradient
