// The times of a pipeline's actions: their costs, which are predicted, and a step as a file for chrome://tracing.
#pragma once

#include <string>
#include <vector>

#include "lockstep/parallel/pipeline_schedule.h"

namespace lockstep::parallel {

// `costs`: of each stage, or one for all.
inline double cost_of(const PipelineAction& action, const std::vector<PipelineCosts>& costs) {
  const auto& stage = costs.size() == 1 ? costs[0] : costs.at(static_cast<std::size_t>(action.stage));
  switch (action.kind) {
    case PipelineAction::Kind::forward: return stage.forward;
    case PipelineAction::Kind::backward: return stage.backward_input + stage.backward_weight;
    case PipelineAction::Kind::backward_input: return stage.backward_input;
    case PipelineAction::Kind::backward_weight: return stage.backward_weight;
  }
  return 0;
}

inline double message_cost_of(const PipelineAction& action, const std::vector<PipelineCosts>& costs) {
  return costs.size() == 1 ? costs[0].message : costs.at(static_cast<std::size_t>(action.stage)).message;
}

// One rank's events: a JSON array. `times` of `actions`, in seconds since `began`.
std::string timeline_events(const std::vector<PipelineAction>& actions, const std::vector<PipelineTimes::Span>& times,
                            int rank, double began);

// Throws IoError.
void write_timeline(const std::string& path, const std::vector<std::string>& events_of_ranks);

}  // namespace lockstep::parallel
