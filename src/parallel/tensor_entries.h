// The entries of a ParallelPlan that are for one part of a model.
#pragma once

#include <set>
#include <string>

#include "lockstep/parallel/tensor_parallel.h"

namespace lockstep::parallel {

// Those that match something in the module, in the plan's order; their patterns are added to `used`.
ParallelPlan entries_for(const torch::nn::Module& module, const ParallelPlan& plan, std::set<std::string>& used);

// Throws InvalidArgument for an entry whose pattern is not used. `caller` begins the message.
void check_all_used(const ParallelPlan& plan, const std::set<std::string>& used, const char* caller);

}  // namespace lockstep::parallel
