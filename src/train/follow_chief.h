// fit on the processes of a cluster with parameter servers that are not its chief.
#pragma once

#include <cstdint>

#include "lockstep/train/model.h"

namespace lockstep::train {

// A worker computes the steps that the chief assigns in its fit, which is call number `call`; a server makes its part
// of the model. Throws what a step throws.
void follow_chief(Model& model, const Dataset& data, const FitOptions& options, std::int64_t call);

}  // namespace lockstep::train
