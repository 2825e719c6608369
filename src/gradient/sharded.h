// Each process updates its shards of the parameters, and has optimizer state for those alone.
//
// Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020: stage 1, with
// gradients that are reduced at their owners only. A bucket is a range of the flat parameters:
//
//   gradients of rank 0   | a0 a1 |                       | v0 |               | v0 v1 |
//   gradients of rank 1   | b0 b1 |  -- reduce_scatter -> | v1 | -- gather --> | v0 v1 |   values, on both
//
// In an elastic job the state of a lost process must not be lost with it. So each process also updates the shards of a
// neighbour, on another host where that is possible, which sends it the sums:
//
//   sums   | v0 |      | v1 |      | v2 |        each sends its own to the next
//   state  | s0 s2 |   | s1 s0 |   | s2 s1 |
//
// as Wang et al., "GEMINI: fast failure recovery in distributed training with in-memory checkpoints", SOSP 2023, place
// copies, but that state is not sent: it is computed twice. A barrier precedes the update (Updater). So where some
// processes have made an update and others have not when one is lost, those can complete it by themselves, and the
// values of shards are gathered again, from either of the two that have them (moving_state.h). Without copies, a
// process that is lost between update and gather leaves the others' values partly of this step, and training begins
// again from a checkpoint.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gradient/bucketed.h"
#include "gradient/process_shards.h"

namespace lockstep::gradient {

class Sharded final : public Bucketed {
 public:
  // `hosts`: those of the ranks now, [rank], in an elastic job; else null.
  using Hosts = std::function<std::vector<std::string>()>;
  Sharded(ReplicatedParameters& parameters, Communicator ranks, BucketOptions options, Hosts hosts);

  // Puts the first copy of the values into memory of the Group.
  void prepare() override;
  void regroup() override;

  ShardMap shards() const override { return shards_->of_this_process(); }
  ShardMap copies() const override { return shards_->copies(); }
  std::vector<std::vector<Shard>> held() const override { return shards_->held(); }
  void sum_over_owners(std::span<double> values, const Group& replicas, Deadline deadline) const override {
    shards_->sum_over_owners(values, replicas, deadline);
  }
  bool divides_state() const override { return true; }
  std::span<const at::Tensor> written(at::ScalarType dtype) const override { return parameters_.flats(dtype).first(1); }
  void publish(const Group& replicas, Deadline deadline) override;
  void publish_between_steps() override;
  at::Tensor gather_from_owners(std::size_t slot, const at::Tensor& own) const override {
    return shards_->gather_from_owners(slot, own);
  }

 private:
  // Values that are gathered together.
  struct Range {
    at::ScalarType dtype;
    std::int64_t begin, count;  // in the flat buffers
    Counts counts;              // [rank]
    at::Tensor sums;
  };

  void reduce() override;
  void lay_out();
  void copy_sums();
  void gather();
  at::Tensor first_copy(const Range& range) const;

  ReplicatedParameters& parameters_;
  const Hosts hosts_;
  std::vector<Range> ranges_;            // constant between regroups, after `prepare`
  std::optional<ProcessShards> shards_;  // likewise
};

// How many ranks further the copies of a rank's shards are, so that as many as possible are on other hosts; 0 for a
// rank alone.
int distance_of_copies(const std::vector<std::string>& hosts);

}  // namespace lockstep::gradient
