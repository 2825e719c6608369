// Keras's LayoutMap as a plan of parallelize_module.
#pragma once

#include "lockstep/parallel/model_parallel_strategy.h"

namespace torch::nn {
class Module;
}

namespace lockstep::parallel {

// Divided layers take and give whole activations. Throws InvalidArgument for a pattern that no parameter's name
// matches, and for a layout whose length is not the parameter's number of dimensions. Throws it also for an axis other
// than `tensor_axis`, and for a parameter that cannot be divided so.
ParallelPlan plan_of(const LayoutMap& map, const torch::nn::Module& module, const std::string& tensor_axis);

}  // namespace lockstep::parallel
