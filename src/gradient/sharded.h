// Each process updates its shards of the parameters, and has optimizer state for those alone.
//
// Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020: stage 1, with
// gradients that are reduced at their owners only. A bucket is a range of the flat parameters:
//
//   gradients of rank 0   | a0 a1 |                       | v0 |               | v0 v1 |
//   gradients of rank 1   | b0 b1 |  -- reduce_scatter -> | v1 | -- gather --> | v0 v1 |   values, on both
//
// A process that is lost between update and gather leaves the others' values partly of this step and partly of the one
// before; and its shards' state is lost with it. Training begins again from a checkpoint.
#pragma once

#include <optional>

#include "gradient/bucketed.h"
#include "gradient/process_shards.h"

namespace lockstep::gradient {

class Sharded final : public Bucketed {
 public:
  Sharded(ReplicatedParameters& parameters, Communicator ranks, BucketOptions options);

  // Puts the first copy of the values into memory of the Group.
  void prepare() override;

  ShardMap shards() const override { return shards_->of_this_process(); }
  void sum_over_owners(std::span<double> values, const Group& replicas, Deadline deadline) const override {
    shards_->sum_over_owners(values, replicas, deadline);
  }
  std::span<const at::Tensor> written(at::ScalarType dtype) const override { return parameters_.flats(dtype).first(1); }
  void publish(const Group& replicas, Deadline deadline) override;
  at::Tensor gather_from_owners(std::size_t slot, const at::Tensor& own) const override {
    return shards_->gather_from_owners(slot, own);
  }

 private:
  // Values that are gathered together.
  struct Range {
    at::ScalarType dtype;
    std::int64_t begin, count;  // in the flat buffers
    Counts counts;              // [rank]
  };

  at::Tensor first_copy(const Range& range) const;

  ReplicatedParameters& parameters_;
  std::vector<Range> ranges_;            // constant after `prepare`
  std::optional<ProcessShards> shards_;  // likewise
};

}  // namespace lockstep::gradient
