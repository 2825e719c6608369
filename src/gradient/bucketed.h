// Sums between ranks while backward runs, in buckets. A rank is a process, whose replicas' gradients are added up in
// its memory; or a replica, whose gradients stay on its GPU.
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
#include <optional>
#include <string>
#include <vector>

#include "gradient/bucketed_rank.h"
#include "gradient/buckets.h"
#include "gradient/reduction.h"
#include "gradient/replicated_parameters.h"

namespace lockstep::gradient {

// The replicas of all processes as ranks: each has its values, and its buckets, on its own GPU.
struct ReplicaRanks {
  std::vector<Communicator> of;                                              // [replica of this process]
  std::function<void(const std::function<void(int replica)>&)> on_replicas;  // calls in every replica's thread
};

struct BucketedOptions {
  BucketOptions buckets;
  bool sum = false;                                      // updates use the sum over the processes instead of the mean
  bool shard_state = false;                              // each rank has state for its own shards alone
  std::function<std::vector<std::string>()> hosts = {};  // of the processes, now, in an elastic job: [rank]; else null
  std::optional<ReplicaRanks> replicas = {};             // empty: each process is a rank
};

class Bucketed final : public Reduction {
 public:
  Bucketed(ReplicatedParameters& parameters, Communicator processes, BucketedOptions options);

  // Throws InvalidArgument on all processes where models, or the numbers of replicas, differ. Where the state is
  // sharded, puts the first copy of the values into memory of the Group.
  void prepare() override;
  at::Device device(int replica) const override { return rank_of(replica).device(); }
  void begin_step(int replica) override;
  at::Tensor memory_for(int replica, std::size_t slot) const override;
  void add(int replica, std::size_t slot, const at::Tensor& gradient) override;
  Sums finish(const Group& replicas, double weight, bool check_finite, Deadline deadline) override;
  void publish(const Group& replicas, Deadline deadline) override;
  void end_step(int replica, StepEnd end) override;
  State state() const override { return ranks_[0]->state(); }
  void restore(const State& state) override;

 private:
  bool is_rank() const { return !options_.replicas; }  // this process
  BucketedRank& rank_of(int replica) const { return *ranks_[is_rank() ? 0 : static_cast<std::size_t>(replica)]; }
  void divide();
  void copy_sums() const;
  void gather_copy(int replica) const;

  // Constant after construction.
  ReplicatedParameters& parameters_;
  const Communicator processes_;
  const BucketedOptions options_;
  std::vector<std::unique_ptr<BucketedRank>> ranks_;  // this process, or its replicas

  // Those of the first rank, where the state is sharded. Constant between calls of `prepare`.
  std::vector<ScatteredBucket> scattered_;
};

}  // namespace lockstep::gradient
