// What ReplicatedModule and ReplicatedOptimizer save, as one worker has it, for others.
#pragma once

#include <memory>

#include "gradient/gradient_path.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::strategy {

// Not collective. Of a module: all parameters, or those that are not trained, and the buffers' mean over this process's
// replicas.
enum class Which { all, untrained };
Trackable values_of(const std::shared_ptr<ReplicatedParameters>& parameters, Which which);

// Not collective. Of an optimizer: all but the state of its rule.
Trackable counters_of(const std::shared_ptr<GradientPath>& gradients);

}  // namespace lockstep::strategy
