// The World of the ranks that remain after processes were lost.
#pragma once

#include <vector>

#include "lockstep/cluster/store.h"
#include "lockstep/cluster/world.h"

namespace lockstep::cluster {

// The World without the ranks `lost`, as Job::regroup describes it. Collective over the others.
World next_generation(const World& world, const Store& store, const std::vector<int>& lost, Deadline deadline);

}  // namespace lockstep::cluster
