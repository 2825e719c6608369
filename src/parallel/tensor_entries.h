// The entries of a ParallelPlan that are for one part of a model.
#pragma once

#include <vector>

#include "lockstep/parallel/tensor_parallel.h"

namespace lockstep::parallel {

// Those that match something in the module, in the plan's order; `used` [entry] gets true for them.
ParallelPlan entries_for(const torch::nn::Module& module, const ParallelPlan& plan, std::vector<bool>& used);

// Throws InvalidArgument for an entry that is not used. `caller` begins the message.
void check_all_used(const ParallelPlan& plan, const std::vector<bool>& used, const char* caller);

}  // namespace lockstep::parallel
