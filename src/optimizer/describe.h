// A description that is equal for optimizers that update equal variables alike.
#pragma once

#include <string>

#include "lockstep/optimizer/optimizer.h"

namespace lockstep::optimizer {

// One setting a line. Settings that a rule does not expose show in the results of a few updates.
std::string describe(const Optimizer& optimizer);

}  // namespace lockstep::optimizer
