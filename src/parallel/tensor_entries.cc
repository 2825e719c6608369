#include "parallel/tensor_entries.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "parallel/name_pattern.h"

namespace lockstep::parallel {

ParallelPlan entries_for(const torch::nn::Module& module, const ParallelPlan& plan, std::set<std::string>& used) {
  const auto modules = module.named_modules("", /*include_self=*/false).keys();
  const auto parameters = module.named_parameters().keys();
  ParallelPlan entries;
  for (const auto& entry : plan) {
    const auto& names = std::holds_alternative<Shard>(entry.second) ? parameters : modules;
    if (!matches_any(entry.first, names)) continue;
    entries.push_back(entry);
    used.insert(entry.first);
  }
  return entries;
}

void check_all_used(const ParallelPlan& plan, const std::set<std::string>& used, const char* caller) {
  for (const auto& entry : plan) {
    if (used.contains(entry.first)) continue;
    throw InvalidArgument(
        text(caller, ": \"", entry.first, "\" matches nothing in any layer; layer i's modules are called \"i.name\""));
  }
}

}  // namespace lockstep::parallel
