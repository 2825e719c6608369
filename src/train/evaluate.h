// Evaluation with the values that this process has, and the results of fit and evaluate, as the chief tells them to the
// other processes of a cluster with parameter servers.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/train/logs.h"
#include "lockstep/train/model.h"

namespace lockstep::train {

std::string print(const Logs& logs);
std::string print(const History& history);

// Throws Error where the text is no such result.
template <class Result>
Result parse(const std::string& text);
template <>
Logs parse<Logs>(const std::string& text);
template <>
History parse<History>(const std::string& text);

// Does what Model::evaluate does, without calls of other processes: `steps` batches, 0 for all. Returns loss and
// metrics. Throws as evaluate.
Logs evaluate_values(const Model& model, const Dataset& data, std::int64_t steps);

}  // namespace lockstep::train
