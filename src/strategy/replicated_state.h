// Parts of the state that ReplicatedModule and ReplicatedOptimizer save.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "gradient/gradient_path.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::strategy {

// A module's values: all parameters, or those that are not trained, with the buffers. `of_all_workers`: whole
// parameters, and the buffers' mean over all replicas; saving and loading are collective, and saving warns where
// replicas differ. `of_this_worker`: this worker's parts of the parameters, and the mean over its own replicas. Loading
// leaves the values whose names are in `left`.
enum class Values { all, untrained };
enum class Whose { of_all_workers, of_this_worker };
Trackable values_of(const std::shared_ptr<ReplicatedParameters>& parameters, Values values, Whose whose,
                    const std::set<std::string>& left = {});

// Returns the name, after a prefix, under which an archive has a state of a parameter.
std::string name_of_state(const StateSpec& state, const std::string& parameter);

// Throws InvalidArgument that names the trained parameters without a state in the archive, as where they were frozen.
void check_states(const Archive& archive, const std::string& prefix, const GradientPath& gradients);

// Returns the optimizer's state without that of its rule. Not collective.
Trackable counters_of(const std::shared_ptr<GradientPath>& gradients);

// Returns the state that an update changes, for a worker that lacks it: this worker's values and buffers, and the
// optimizer's state. Where the optimizer completes its state by itself: its counters alone. Where workers train by
// themselves: nothing. Not collective.
Trackable update_of(const std::shared_ptr<ReplicatedParameters>& parameters,
                    const std::shared_ptr<GradientPath>& gradients);

// Returns the state of a newcomer that GradientPath::regroup does not bring. Not collective.
Trackable newcomers_part_of(const std::shared_ptr<ReplicatedParameters>& parameters,
                            const std::shared_ptr<GradientPath>& gradients);

}  // namespace lockstep::strategy
