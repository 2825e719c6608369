// Comparison of the settings that all processes of a fit must have in common.
#pragma once

#include <string>

#include "train/model_impl.h"

namespace lockstep::train {

// Collective over the fit's processes: throw InvalidArgument on all of them, naming one and what differs. The second
// compares the callbacks that all workers call, because these may save or evaluate the model together. The third
// compares where the workers begin, which differs where one restored a checkpoint alone.
void compare_fits(const ModelImpl& impl, const Dataset& data, const FitOptions& options);
void compare_callbacks(const ModelImpl& impl, const FitOptions& options);
void compare_states(const Model& model);

// Returns all that a process must have in common with the fit of an elastic strategy to join it; else an empty text.
std::string describe_member(const ModelImpl& impl, const Dataset& data, const FitOptions& options);

// Warns where a launcher started several processes that each train alone.
void warn_of_copies(const ModelImpl& impl);

}  // namespace lockstep::train
