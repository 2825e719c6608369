// fully_shard for strategies.
#pragma once

#include "gradient/split_module.h"
#include "parallel/sharded_units.h"

namespace lockstep::parallel {

// Returns the part that a rank trains of a module whose parameters are in these units: its shards, under the
// parameters' names in the module. Shards stay in one piece for each flat buffer of the units.
gradient::SplitModule split_shards(const std::shared_ptr<ShardedUnits>& units, const torch::nn::Module& module);

}  // namespace lockstep::parallel
