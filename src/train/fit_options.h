// Checks of fit's options, and what they change in the data.
#pragma once

#include "lockstep/train/model.h"

namespace lockstep::train {

// Throws InvalidArgument naming an option that no correct program passes.
void check_fit_options(const Dataset& data, const FitOptions& options);

// The data set with sample weights multiplied by class_weight.
Dataset weighed(const Dataset& data, const FitOptions& options);

}  // namespace lockstep::train
