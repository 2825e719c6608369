// The shards that each of several processes owns.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "gradient/replicated_parameters.h"
#include "gradient/shard_map.h"
#include "lockstep/collective/communicator.h"

namespace lockstep::gradient {

// What a GradientSync says of them.
class ProcessShards {
 public:
  // `shards[r]`: rank r's, by ascending slot, at most one of a slot.
  ProcessShards(const ReplicatedParameters& parameters, Communicator ranks, std::vector<std::vector<Shard>> shards);

  ShardMap of_this_process() const;
  void sum_over_owners(std::span<double> values, const Group& replicas, Deadline deadline) const;
  at::Tensor gather_from_owners(std::size_t slot, const at::Tensor& own) const;

 private:
  const ReplicatedParameters& parameters_;
  const Communicator ranks_;
  const std::vector<std::vector<Shard>> shards_;
};

}  // namespace lockstep::gradient
