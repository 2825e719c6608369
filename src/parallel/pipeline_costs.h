// The predicted costs of a pipeline's actions.
#pragma once

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

}  // namespace lockstep::parallel
