// The shards that each of several processes owns.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "gradient/replicated_parameters.h"
#include "gradient/shard_map.h"
#include "lockstep/collective/communicator.h"

namespace lockstep::gradient {

// What a GradientSync says of them. Constant; for one Group of the ranks.
class ProcessShards {
 public:
  // `shards[r]`: rank r's, by ascending slot, at most one of a slot. Rank r + `distance`, modulo the number of ranks,
  // has copies of them; 0: nobody has.
  ProcessShards(const ReplicatedParameters& parameters, Communicator ranks, std::vector<std::vector<Shard>> shards,
                int distance = 0);

  ShardMap of_this_process() const;
  ShardMap copies() const;
  std::vector<std::vector<Shard>> held() const;
  void sum_over_owners(std::span<double> values, const Group& replicas, Deadline deadline) const;
  at::Tensor gather_from_owners(std::size_t slot, const at::Tensor& own) const;

  // Whose shards `rank` has copies of, and who has copies of its shards; `rank` itself where nobody has.
  int copied_by(int rank) const { return (rank + size() - distance_) % size(); }
  int copy_of(int rank) const { return (rank + distance_) % size(); }

 private:
  int size() const { return static_cast<int>(shards_.size()); }
  ShardMap map_of(std::vector<Shard> shards) const;

  const ReplicatedParameters& parameters_;
  const Communicator ranks_;
  const std::vector<std::vector<Shard>> shards_;
  const int distance_;
};

}  // namespace lockstep::gradient
