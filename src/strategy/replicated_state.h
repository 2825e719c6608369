// Parts of what ReplicatedModule and ReplicatedOptimizer save.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "gradient/gradient_path.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::strategy {

// A module's values: all parameters, or those that are not trained, with the buffers. `of_all_workers`: whole
// parameters, and the buffers' mean over all replicas; saving and loading are collective. `of_this_worker`: the parts
// of the parameters that this worker has, and the mean over its own replicas. Loading leaves those values as they are
// whose names are in `left`.
enum class Values { all, untrained };
enum class Whose { of_all_workers, of_this_worker };
Trackable values_of(const std::shared_ptr<ReplicatedParameters>& parameters, Values values, Whose whose,
                    const std::set<std::string>& left = {});

// Under which name, behind a prefix, an archive has a state of a parameter.
std::string name_of_state(const StateSpec& state, const std::string& parameter);

// Throws InvalidArgument that names the trained parameters of which an archive has no state, as where they were frozen.
void check_states(const Archive& archive, const std::string& prefix, const GradientPath& gradients);

// Not collective. Of an optimizer: all but the state of its rule.
Trackable counters_of(const std::shared_ptr<GradientPath>& gradients);

}  // namespace lockstep::strategy
