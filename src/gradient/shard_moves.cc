#include "gradient/shard_moves.h"

#include <algorithm>
#include <map>

namespace lockstep::gradient {
namespace {

// Elements below which a part is not divided among those that have it.
constexpr std::int64_t kDivided = 16384;

struct Holder {
  int rank;
  std::int64_t begin, end;
};
using Holders = std::map<std::size_t, std::vector<Holder>>;  // [slot]

Holders holders_of(const std::vector<std::vector<Shard>>& had) {
  Holders holders;
  for (std::size_t rank = 0; rank < had.size(); ++rank) {
    for (const auto& shard : had[rank]) {
      holders[shard.slot].push_back({static_cast<int>(rank), shard.begin, shard.begin + shard.count});
    }
  }
  return holders;
}

// Where, within the shard, another set of ranks begins to have the elements; and its end.
std::vector<std::int64_t> cuts_of(const Shard& shard, const std::vector<Holder>& holders) {
  std::vector<std::int64_t> cuts{shard.begin, shard.begin + shard.count};
  for (const auto& holder : holders) {
    for (const auto at : {holder.begin, holder.end}) {
      if (at > shard.begin && at < shard.begin + shard.count) cuts.push_back(at);
    }
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

void add_moves(const Shard& part, const std::vector<int>& from, int to, std::vector<ShardMove>& moves) {
  const auto count = static_cast<std::int64_t>(from.size());
  if (part.count < kDivided) {
    const auto one = static_cast<std::int64_t>(part.slot) + to;
    moves.push_back({from[static_cast<std::size_t>(one % count)], to, part});
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const auto begin = part.count * i / count, end = part.count * (i + 1) / count;
    moves.push_back({from[static_cast<std::size_t>(i)], to, {part.slot, part.begin + begin, end - begin}});
  }
}

}  // namespace

ShardMoves moves_between(const std::vector<std::vector<Shard>>& had, const std::vector<std::vector<Shard>>& needed) {
  const auto all = holders_of(had);
  const std::vector<Holder> none;
  ShardMoves result;
  for (std::size_t rank = 0; rank < needed.size(); ++rank) {
    const int to = static_cast<int>(rank);
    for (const auto& shard : needed[rank]) {
      const auto found = all.find(shard.slot);
      const auto& holders = found == all.end() ? none : found->second;
      const auto cuts = cuts_of(shard, holders);
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        const Shard part{shard.slot, cuts[i], cuts[i + 1] - cuts[i]};
        std::vector<int> from;
        for (const auto& holder : holders) {
          if (holder.begin <= part.begin && part.begin < holder.end) from.push_back(holder.rank);
        }
        if (from.empty()) {
          result.lost.push_back(part);
        } else if (std::find(from.begin(), from.end(), to) != from.end()) {
          result.moves.push_back({to, to, part});
        } else {
          add_moves(part, from, to, result.moves);
        }
      }
    }
  }
  return result;
}

}  // namespace lockstep::gradient
