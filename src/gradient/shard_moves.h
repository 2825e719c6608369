// Which process sends which elements to which, where processes have shards and need others.
#pragma once

#include <vector>

#include "gradient/shard_map.h"

namespace lockstep::gradient {

struct ShardMove {
  int from, to;  // equal where the process has it itself
  Shard part;
};

struct ShardMoves {
  std::vector<ShardMove> moves;  // by receiver
  std::vector<Shard> lost;       // what nobody has
};

// `had[r]`, `needed[r]`: rank r's shards; several may have or need the same. Where several have what another one needs,
// each of them sends a part. The same on all processes that have the same lists.
ShardMoves moves_between(const std::vector<std::vector<Shard>>& had, const std::vector<std::vector<Shard>>& needed);

}  // namespace lockstep::gradient
