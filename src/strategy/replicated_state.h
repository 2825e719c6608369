// Parts of what ReplicatedModule and ReplicatedOptimizer save.
#pragma once

#include <memory>
#include <string>

#include "gradient/gradient_path.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::strategy {

// Of a module: all parameters, or those that are not trained; and the buffers' mean over the replicas of all workers,
// for which saving is collective, or over this worker's.
enum class Values { all, untrained };
enum class Buffers { of_all_workers, of_this_worker };
Trackable values_of(const std::shared_ptr<ReplicatedParameters>& parameters, Values values, Buffers buffers);

// Under which name, behind a prefix, an archive has a state of a parameter.
std::string name_of_state(const StateSpec& state, const std::string& parameter);

// Not collective. Of an optimizer: all but the state of its rule.
Trackable counters_of(const std::shared_ptr<GradientPath>& gradients);

}  // namespace lockstep::strategy
