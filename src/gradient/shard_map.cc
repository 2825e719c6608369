#include "gradient/shard_map.h"

#include <algorithm>

namespace lockstep {
namespace {

// Shards are cut at multiples of this many elements: whole cache lines for float and double.
constexpr std::int64_t kCut = 16;

}  // namespace

ShardMap ShardMap::all_to(int owner, const std::vector<ParameterSlot>& slots, int owners) {
  ShardMap map(owners);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].trainable) map.shards_[static_cast<std::size_t>(owner)].push_back({i, 0, slots[i].numel});
  }
  return map;
}

ShardMap ShardMap::even(const std::vector<ParameterSlot>& slots, int owners) {
  ShardMap map(owners);
  std::int64_t total = 0;
  for (const auto& slot : slots) total += slot.trainable ? slot.numel : 0;
  std::int64_t owner = 0, done = 0;
  const auto end_of = [&](std::int64_t one) { return total * (one + 1) / owners; };
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (!slots[i].trainable) continue;
    for (std::int64_t begin = 0; begin < slots[i].numel;) {
      while (owner + 1 < owners && done >= end_of(owner)) ++owner;
      std::int64_t count = slots[i].numel - begin;
      if (owner + 1 < owners) count = std::min(count, (end_of(owner) - done + kCut - 1) / kCut * kCut);
      map.shards_[static_cast<std::size_t>(owner)].push_back({i, begin, count});
      begin += count;
      done += count;
    }
  }
  return map;
}

}  // namespace lockstep
