// Checks of fit's options, and what they change in the data.
#pragma once

#include <cstdint>
#include <map>

#include "lockstep/train/model.h"

namespace lockstep::train {

// Throws InvalidArgument naming an option that no correct program passes.
void check_fit_options(const Dataset& data, const FitOptions& options);

// Multiplies the batch's sample weights by the weights of its labels.
Example weigh_by_class(Example batch, const std::map<std::int64_t, double>& class_weight);

}  // namespace lockstep::train
