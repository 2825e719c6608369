// What must be the same for all processes that take part in a fit.
#pragma once

#include <string>

#include "train/model_impl.h"

namespace lockstep::train {

// Collective over the fit's processes: throw InvalidArgument on all of them, naming one and what differs. The second
// compares the callbacks that all workers call, because these may save or evaluate the model together; the third where
// they begin, which differs where one restored a checkpoint alone.
void compare_fits(const ModelImpl& impl, const Dataset& data, const FitOptions& options);
void compare_callbacks(const ModelImpl& impl, const FitOptions& options);
void compare_states(const Model& model);

// All that a process must have too that comes to the fit of an elastic strategy; empty for other strategies.
std::string describe_member(const ModelImpl& impl, const Dataset& data, const FitOptions& options);

// Warns where a launcher started several processes that each train alone.
void warn_of_copies(const ModelImpl& impl);

}  // namespace lockstep::train
