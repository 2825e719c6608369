// Gradients in buckets, averaged over the ranks while backward goes on.
//
// After Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 2020.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "collective/calls.h"
#include "gradient/device_of_sums.h"
#include "gradient/eight_bit_mean.h"
#include "gradient/ownership.h"
#include "gradient/pass_weights.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/gradient/gradient_hook.h"

namespace lockstep::gradient {

struct BucketOptions {
  std::size_t bucket_bytes = 0;              // 0: by the size of the model
  std::size_t first_bucket_bytes = 1 << 20;  // smaller, so that it is sent early
  std::optional<DType> gradient_dtype;   // float16, bfloat16, or int8 (EightBitMean): what float gradients are sent as
  std::vector<std::int64_t> order;       // of slots, from an earlier training; empty: that of the first pass
  GradientHook hook;                     // instead of all_reduce
  bool idle_cores = false;               // this process has more cores than it computes on
  bool scatter = false;                  // reduce_scatter: a rank gets the means of its own shards alone
  std::string called = "the gradients";  // what they are of, such as "DistributedDataParallel"
};

// A parameter, as Buckets needs to know it.
struct BucketSlot {
  std::string name;
  at::ScalarType dtype;  // float, double, half or bfloat16
  std::int64_t numel;
  bool follows = true;  // its parameter directly follows the previous slot's in memory: they can be scattered together
  at::Device device = at::kCPU;  // where its gradients are summed: on a GPU where the Group reaches that
};

// A bucket of consecutive slots, laid out as their parameters are in the flat buffer and cut into one range a rank.
struct ScatteredBucket {
  std::size_t first_slot;
  FlatLayout::Cut cut;
  at::Tensor mean;  // of which this rank gets its range
};

// In each pass, on each rank, every slot is filled and marked ready once; then one thread calls `finish`. Means may be
// read until the next pass overwrites them. All ranks have the same slots and make the same passes.
//
// `input` and `mark_ready` may be called by several threads at once, for different slots; everything else by one.
class Buckets {
 public:
  // Collective. Throws InvalidArgument for an order that is no permutation of the slots, and for a dtype that cannot be
  // sent.
  Buckets(std::vector<BucketSlot> slots, Communicator ranks, BucketOptions options);
  ~Buckets();
  Buckets(const Buckets&) = delete;
  Buckets& operator=(const Buckets&) = delete;

  // Takes the communicator's new Group after a regroup, and returns whether there was one. Memory and layout are then
  // made anew; the weight scale and an unfinished pass are discarded. `find_device` returns where the new Group's
  // gradients are summed; null: where they were. Collective, as `find_device` may be.
  bool rebuild_after_regroup(const std::function<at::Device()>& find_device = nullptr);

  const Communicator& ranks() const { return ranks_; }
  PassWeights& weights() { return weights_; }
  const PassWeights& weights() const { return weights_; }

  // BucketOptions::called and a number among the objects made over this Group, such as "DistributedDataParallel 1".
  const std::string& name() const { return name_; }

  // True where buckets are reduced while backward goes on; the same on all ranks.
  bool overlaps() const { return overlaps_; }

  // Flat, of the slot's dtype or gradient_dtype: what this rank sends.
  const at::Tensor& input(std::size_t slot) const { return slots_[slot].input; }
  void mark_ready(std::size_t slot, bool has_gradient);
  bool is_ready(std::size_t slot) const { return slots_[slot].ready; }

  // Requires that all slots are ready. Returns when the means are complete. Throws what the Group throws.
  void finish();

  // Flat, of the slot's dtype: the mean over the ranks, and whether any rank has a gradient. The host waits for a GPU
  // to tell that of a slot of which this rank has none. Where means are scattered, only this rank's shards are valid.
  const at::Tensor& mean(std::size_t slot) const { return slots_[slot].mean; }
  bool has_gradient(std::size_t slot);
  void multiply(double factor);  // all means
  bool all_finite() const;       // on all ranks; collective where means are scattered

  // Called after each pass. After the first one the buckets are rebuilt in the order in which rank `root`'s gradients
  // became ready; `input` and `mean` then return other tensors. Collective in the first pass.
  void end_pass(int root);

  // True once the order of slots is known. The bits of sums depend on the order.
  bool knows_order() const { return knows_order_; }
  const std::vector<std::int64_t>& order() const { return order_; }
  void restore_order(const std::vector<std::int64_t>& order);  // ignored unless it is a permutation of these slots

  // Returns the reductions that the pass has started.
  std::vector<Work> started() const {
    std::vector<Work> works;
    for (const auto& bucket : buckets_) {
      if (bucket.work) works.push_back(*bucket.work);
    }
    return works;
  }

  // With `scatter`: which rank gets which means, by ascending slot. Constant between regroups, as the order is then.
  std::vector<ScatteredBucket> scattered() const;

  // Changes with each new layout, which invalidates views of inputs and means.
  int layout() const { return layout_; }

 private:
  struct Slot {
    std::size_t bucket = 0;
    at::Tensor input, mean, flag;  // flag: one element
    bool ready = false;            // written by the thread that marks it
    bool has_gradient = false;     // this rank, once it is marked; any rank, once the bucket's flags were read
  };
  struct Bucket {
    GradientBucket shown;  // the gradients, then the flags
    at::Tensor memory;
    at::Tensor input, mean, flags;
    std::unique_ptr<EightBitMean> in_8_bits;  // null where values are sent as they lie in `memory`
    std::vector<std::size_t> slots;
    FlatLayout::Cut cut;                       // of input, where means are scattered
    collective::Slice own;                     // elements whose mean this rank gets
    std::shared_ptr<const std::string> names;  // for timelines
    Purpose purpose;
    bool flags_are_read = false;       // in this pass
    std::size_t missing = 0;           // slots that are not ready; guarded by mutex_
    std::vector<c10::Stream> streams;  // on a GPU, of the threads that filled it; guarded by mutex_
    std::optional<Work> work;
  };

  void find_overlap();
  void name_anew();
  void make();
  std::vector<std::vector<std::size_t>> slots_of_buckets() const;
  Bucket make_bucket(std::vector<std::size_t> slots);
  static at::Tensor own_part(const Bucket& bucket, const at::Tensor& of);
  std::vector<Call> calls_of(const Bucket& bucket) const;
  void describe(const Bucket& bucket, Call& call) const;
  Work start_in_8_bits(const Bucket& bucket) const;
  std::vector<EightBitMean::Elements> idle_in(const Bucket& bucket) const;
  void start_pass();
  void launch(Bucket& bucket);
  void receive(Bucket& bucket);
  void end_pending();

  // Constant after construction.
  const Communicator ranks_;
  const BucketOptions options_;

  // Set anew after each regroup.
  std::vector<BucketSlot> infos_;  // their devices alone
  Group group_;
  std::int64_t regroups_;
  bool overlaps_ = false;
  std::string name_;
  Purpose ordering_;  // the broadcast of the order
  PassWeights weights_;

  std::vector<std::int64_t> order_;
  bool knows_order_ = false;
  int layout_ = 0;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;

  Mutex mutex_;
  std::size_t launched_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // buckets started in this pass
  std::vector<std::int64_t> ready_order_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::gradient
