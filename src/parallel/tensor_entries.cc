#include "parallel/tensor_entries.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "parallel/name_pattern.h"

namespace lockstep::parallel {

ParallelPlan entries_for(const torch::nn::Module& module, const ParallelPlan& plan, std::vector<bool>& used) {
  const auto modules = module.named_modules("", /*include_self=*/false).keys();
  const auto parameters = module.named_parameters().keys();
  ParallelPlan entries;
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const auto& names = std::holds_alternative<Shard>(plan[i].second) ? parameters : modules;
    if (std::none_of(names.begin(), names.end(), [&](const auto& name) { return matches(plan[i].first, name); }))
      continue;
    entries.push_back(plan[i]);
    used[i] = true;
  }
  return entries;
}

void check_all_used(const ParallelPlan& plan, const std::vector<bool>& used, const char* caller) {
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (used[i]) continue;
    throw InvalidArgument(text(caller, ": \"", plan[i].first,
                               "\" matches nothing in any layer; layer i's modules are called \"i.name\""));
  }
}

}  // namespace lockstep::parallel
