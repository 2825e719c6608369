// Which owner updates which elements of the parameters.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace lockstep::gradient {

// Elements of one parameter that one owner updates.
struct Shard {
  std::size_t slot;
  std::int64_t begin;
  std::int64_t count;
};

// The shards that this process owns, by the replica that updates them. Constant.
class ShardMap {
 public:
  // Of no shard.
  ShardMap() = default;

  // Equal shares of the elements, cut at whole cache lines.
  static ShardMap even(std::vector<Shard> owned, int replicas);

  // All shards to one replica.
  static ShardMap all_to(int replica, std::vector<Shard> owned, int replicas);

  // Ascending, at most one of a slot.
  const std::vector<Shard>& owned() const { return owned_; }

  const std::vector<Shard>& of(int replica) const {
    return shares_.empty() ? owned_ : shares_[static_cast<std::size_t>(replica)];
  }

 private:
  ShardMap(std::vector<Shard> owned, int replicas)
      : owned_(std::move(owned)), shares_(static_cast<std::size_t>(replicas)) {}

  std::vector<Shard> owned_;
  std::vector<std::vector<Shard>> shares_;  // [replica]
};

// `numel` rounded up to whole cache lines.
inline std::int64_t whole_lines(std::int64_t numel, at::ScalarType dtype) {
  const auto line = 64 / static_cast<std::int64_t>(at::elementSize(dtype));
  return (numel + line - 1) / line * line;
}

}  // namespace lockstep::gradient
