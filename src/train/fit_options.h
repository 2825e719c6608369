// Checks of fit's options, what they change in the data, and the comparison of the settings that all processes of a fit
// must have in common.
#pragma once

#include <optional>
#include <string>

#include "lockstep/train/model.h"
#include "train/model_impl.h"

namespace lockstep::train {

// Throws InvalidArgument naming an option that no correct program passes.
void check_fit_options(const Dataset& data, const FitOptions& options);

// Throws InvalidArgument where the fit validates and `kept` has no batch: validation_data that keep their first
// element. Reads the first batch where their number is not known.
void require_validation_data(const std::optional<Dataset>& kept, const FitOptions& options,
                             const internal::LocalReplicas& replicas);

// Prints the loss and the metrics, one a line.
std::string describe_compiled(const ModelImpl& model);

// Prints what all processes that make the same steps must have in common: the compiled settings, the options' numbers,
// and the first batch. Where processes read their own data, the first batch's shape stands for the batch.
std::string describe_fit(const ModelImpl& model, const Dataset& data, const FitOptions& options,
                         const internal::LocalReplicas& replicas);

// Returns the data set with sample weights multiplied by class_weight, by the labels that the model's loss reads.
Dataset weighed(const ModelImpl& model, const Dataset& data, const FitOptions& options);

// Collective over the fit's processes: throw InvalidArgument on all of them, naming one and what differs. The first
// compares also the callbacks that all workers call, because these may save or evaluate the model together. The second
// compares where the workers begin, which differs where one restored a checkpoint alone.
void compare_fits(const ModelImpl& impl, const Dataset& data, const FitOptions& options);
void compare_states(const Model& model);

// Returns all that a process must have in common with the fit of an elastic strategy to join it.
std::string describe_member(const ModelImpl& impl, const Dataset& data, const FitOptions& options);

// Warns where a launcher started several processes that each train alone.
void warn_of_copies(const ModelImpl& impl);

}  // namespace lockstep::train
