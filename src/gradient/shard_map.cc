#include "gradient/shard_map.h"

#include <algorithm>

namespace lockstep::gradient {
namespace {

// Shards are cut at multiples of this many elements: whole cache lines for float and double.
constexpr std::int64_t kCut = 16;

}  // namespace

ShardMap ShardMap::all_to(int replica, std::vector<Shard> owned, int replicas) {
  ShardMap map(std::move(owned), replicas);
  map.shares_[static_cast<std::size_t>(replica)] = map.owned_;
  return map;
}

ShardMap ShardMap::even(std::vector<Shard> owned, int replicas) {
  ShardMap map(std::move(owned), replicas);
  std::int64_t total = 0;
  for (const auto& shard : map.owned_) total += shard.count;
  std::int64_t replica = 0, done = 0;
  const auto end_of = [&](std::int64_t one) { return total * (one + 1) / replicas; };
  for (const auto& shard : map.owned_) {
    for (std::int64_t at = 0; at < shard.count;) {
      while (replica + 1 < replicas && done >= end_of(replica)) ++replica;
      std::int64_t count = shard.count - at;
      if (replica + 1 < replicas) count = std::min(count, (end_of(replica) - done + kCut - 1) / kCut * kCut);
      map.shares_[static_cast<std::size_t>(replica)].push_back({shard.slot, shard.begin + at, count});
      at += count;
      done += count;
    }
  }
  return map;
}

}  // namespace lockstep::gradient
