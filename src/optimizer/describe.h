// What two optimizers must have in common to move equal variables alike.
#pragma once

#include <string>

#include "lockstep/optimizer/optimizer.h"

namespace lockstep::optimizer {

// A setting a line. What a rule keeps to itself shows in what it makes of a few numbers.
std::string describe(const Optimizer& optimizer);

}  // namespace lockstep::optimizer
