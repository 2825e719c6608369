// Evaluation with the values that this process has.
#pragma once

#include <cstdint>

#include "lockstep/train/model.h"

namespace lockstep::train {

// Does what Model::evaluate does, without calls of other processes: `steps` batches, 0 for all. Returns loss and
// metrics. Throws as evaluate.
Logs evaluate_values(const Model& model, const Dataset& data, std::int64_t steps);

}  // namespace lockstep::train
