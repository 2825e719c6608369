// Sharded optimizer state (sharded.h) where processes share memory: as in OnePass, each replica reads the gradients of
// all processes' replicas in its shards, and writes new values to all processes.
//
//   gradients of process 0 | a0 a1 |                                            | v0 v1 |  values of process 0
//                                     -- process i adds ai and bi, writes vi -->
//   gradients of process 1 | b0 b1 |                                            | v0 v1 |  values of process 1
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gradient/one_pass.h"
#include "gradient/process_shards.h"

namespace lockstep::gradient {

class ShardedOnePass final : public OnePass {
 public:
  // Null, on all processes, where they do not share memory. Collective. Throws InvalidArgument on all processes where
  // models, or the numbers of replicas, differ. Puts the first copy of the values into memory of the Group.
  static std::unique_ptr<ShardedOnePass> make(ReplicatedParameters& parameters, const Communicator& ranks);

  ShardMap shards() const override { return shards_.of_this_process(); }
  std::vector<std::vector<Shard>> held() const override { return shards_.held(); }
  bool during_backward() const override { return true; }
  at::Tensor memory_for(int replica, std::size_t slot) const override;
  void on_ready(int replica, std::size_t slot, const at::Tensor& gradient) override;
  void wait(const Group& replicas, Deadline deadline) override;
  Totals totals() const override { return totals_; }
  std::vector<const at::Tensor*> sources(std::size_t slot) const override { return sources_[slot]; }
  void sum_over_owners(std::span<double> values, const Group& replicas, Deadline deadline) const override {
    shards_.sum_over_owners(values, replicas, deadline);
  }
  std::span<const at::Tensor> written(at::ScalarType dtype) const override { return parameters_.shared_values(dtype); }
  void publish(const Group& replicas, Deadline deadline) override;
  at::Tensor gather_from_owners(std::size_t slot, const at::Tensor& own) const override {
    return shards_.gather_from_owners(slot, own);
  }

 private:
  // `parts[r]`: rank r's memory, for the gradients of its replicas.
  ShardedOnePass(ReplicatedParameters& parameters, Communicator ranks, const std::vector<Memory>& parts);
  void exchange_flags();
  std::int64_t trainable_end(at::ScalarType dtype) const;  // in the flat buffers
  const at::Tensor& own_gradient(int replica, std::size_t slot) const {
    return gradients_[static_cast<std::size_t>(ranks_.rank())][static_cast<std::size_t>(replica)][slot];
  }

  // Constant after construction.
  const Communicator ranks_;
  const ProcessShards shards_;
  std::vector<std::vector<std::vector<at::Tensor>>> gradients_;  // [rank][replica][slot]: flat

  // Of this step, after `wait`.
  Totals totals_;
  std::vector<std::vector<const at::Tensor*>> sources_;  // [slot]
};

}  // namespace lockstep::gradient
