// Checks of fit's options, and what they change in the data.
#pragma once

#include <optional>
#include <string>

#include "lockstep/train/model.h"

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

}  // namespace lockstep::train
