// fit on the processes of a cluster with parameter servers that are not its chief.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/train/model.h"

namespace lockstep::servers {

// Follows the chief's fit, call number `call`: a worker computes the steps that the chief assigns, a server makes its
// part of the model, an evaluator follows checkpoints. Returns the fit's outcome (outcome.h). Throws what a step
// throws, and Interrupted: a worker after its step, a server when the chief has ended the fit.
std::string follow_chief(Model& model, const Dataset& data, const FitOptions& options, std::int64_t call);

}  // namespace lockstep::servers
