// fit on the evaluator of a cluster with parameter servers.
#pragma once

#include <cstdint>

#include "lockstep/train/model.h"
#include "train/signal_guard.h"

namespace lockstep::servers {

// Evaluates validation_data with the full checkpoints that the chief writes in its fit, call number `call`. A
// checkpoint that is replaced before it was read is left out. Prints the results, and gives them to the callbacks'
// on_test_end. Returns after the last checkpoint when the chief's fit has ended, or when a signal came; at once where
// there are no validation_data. Follows keras.utils.SidecarEvaluator.
void follow_checkpoints(Model& model, const FitOptions& options, std::int64_t call, const train::SignalGuard& signals);

}  // namespace lockstep::servers
