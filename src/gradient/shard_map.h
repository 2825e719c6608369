// Which owner updates which elements of the parameters.
#pragma once

#include <cstdint>
#include <vector>

#include "gradient/replicated_parameters.h"

namespace lockstep {

// Elements of one parameter that one owner updates.
struct Shard {
  std::size_t slot;
  std::int64_t begin;
  std::int64_t count;
};

// The shards of all trainable parameters. Owners are the replicas of this process. Constant.
class ShardMap {
 public:
  // Equal shares of all elements, cut at whole cache lines.
  static ShardMap even(const std::vector<ParameterSlot>& slots, int owners);

  // All of them to one.
  static ShardMap all_to(int owner, const std::vector<ParameterSlot>& slots, int owners);

  const std::vector<Shard>& of(int owner) const { return shards_[static_cast<std::size_t>(owner)]; }

 private:
  explicit ShardMap(int owners) : shards_(static_cast<std::size_t>(owners)) {}
  std::vector<std::vector<Shard>> shards_;  // [owner]
};

}  // namespace lockstep
