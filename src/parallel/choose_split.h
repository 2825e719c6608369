// The choice of plan_parallel: a pure function of a profile.
#pragma once

#include <cstdint>
#include <map>
#include <set>

#include "lockstep/parallel/plan.h"
#include "parallel/split_profile.h"

namespace lockstep::parallel {

struct PlanInput {
  int ranks = 1;
  std::size_t layers = 1;
  std::int64_t examples = 1;  // of a step, on all ranks
  const PlanOptions& options;
};

// The measurements that the choice needs.
struct PlanNeeds {
  std::map<LayerDivision, std::set<std::int64_t>> divisions;  // with the examples of microbatches
  std::set<int> data_axes;                                    // sizes of those that average gradients
  std::set<int> tensor_axes;                                  // of meshes with a pipeline
};

// Both throw InvalidArgument where nothing is possible.
PlanNeeds needs_of(const PlanInput& input);
SplitPlan choose_split(const PlanInput& input, const Profile& profile);

}  // namespace lockstep::parallel
