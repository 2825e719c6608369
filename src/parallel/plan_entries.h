// Patterns of the names of modules and parameters, in plans and in other options.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/parallel/model_parallel_strategy.h"
#include "lockstep/parallel/tensor_parallel.h"

namespace torch::nn {
class Module;
}

namespace lockstep::parallel {

// True where `name` matches `pattern`, in which "*" stands for any characters but a dot.
bool matches(std::string_view pattern, std::string_view name);

bool matches_any(std::string_view pattern, const std::vector<std::string>& names);

// For the message that no name matches: "did you mean blocks.*.qkv?", or which names there are.
std::string suggestion(const std::string& pattern, const std::vector<std::string>& names);

// Those that match something in the module, in the plan's order; their patterns are added to `used`.
ParallelPlan entries_for(const torch::nn::Module& module, const ParallelPlan& plan, std::set<std::string>& used);

// Throws InvalidArgument for an entry whose pattern is not used. `caller` begins the message.
void check_all_used(const ParallelPlan& plan, const std::set<std::string>& used, const char* caller);

// Divided layers take and give whole activations. Throws InvalidArgument for a pattern that no parameter's name
// matches, and for a layout whose length is not the parameter's number of dimensions. Throws it also for an axis other
// than `tensor_axis`, and for a parameter that cannot be divided so.
ParallelPlan plan_of(const LayoutMap& map, const torch::nn::Module& module, const std::string& tensor_axis);

}  // namespace lockstep::parallel
