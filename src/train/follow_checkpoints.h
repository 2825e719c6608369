// fit on the evaluator of a cluster with parameter servers.
#pragma once

#include <cstdint>

#include "lockstep/train/model.h"
#include "train/signal_guard.h"

namespace lockstep::train {

// Evaluates validation_data with each full checkpoint that the chief writes in its fit, call number `call`, as it finds
// them: one that is replaced before it was read is left out. Results are printed and given to the callbacks'
// on_test_end. Returns after the last checkpoint when the chief's fit has ended, or when a signal came. Where there are
// no validation_data it returns at once. Follows keras.utils.SidecarEvaluator.
void follow_checkpoints(Model& model, const FitOptions& options, std::int64_t call, const SignalGuard& signals);

}  // namespace lockstep::train
