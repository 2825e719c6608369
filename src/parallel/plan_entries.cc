#include "parallel/plan_entries.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parallel {
namespace {

std::vector<std::string> parts_of(const std::string& name) {
  std::vector<std::string> parts;
  std::istringstream in(name);
  for (std::string part; std::getline(in, part, '.');) parts.push_back(part);
  return parts;
}

// The name with "*" where the pattern has it.
std::string masked(const std::string& name, const std::vector<std::string>& pattern) {
  auto parts = parts_of(name);
  for (std::size_t i = 0; parts.size() == pattern.size() && i < parts.size(); ++i) {
    if (pattern[i] == "*") parts[i] = "*";
  }
  return join(parts, ".");
}

}  // namespace

bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] != '*') return !name.empty() && name[0] == pattern[0] && matches(pattern.substr(1), name.substr(1));
  for (std::size_t length = 0;; ++length) {
    if (matches(pattern.substr(1), name.substr(length))) return true;
    if (length == name.size() || name[length] == '.') return false;
  }
}

bool matches_any(std::string_view pattern, const std::vector<std::string>& names) {
  return std::ranges::any_of(names, [&](const auto& name) { return matches(pattern, name); });
}

std::string suggestion(const std::string& pattern, const std::vector<std::string>& names) {
  std::vector<std::string> candidates;
  for (const auto& name : names) {
    auto candidate = masked(name, parts_of(pattern));
    if (std::ranges::find(candidates, candidate) == candidates.end()) candidates.push_back(candidate);
  }
  const auto near = near_names(pattern, candidates);
  return near.empty() ? "there are " + first_of(names) : "did you mean " + join(near, " or ") + "?";
}

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

namespace {

constexpr int kWhole = -1;

std::string shown(const std::vector<std::string>& layout) {
  std::vector<std::string> words;
  for (const auto& axis : layout) words.push_back(text('"', axis, '"'));
  return text("{", join(words), "}");
}

// The dimension that is divided, or kWhole.
int divided_dimension(const std::string& name, const Tensor& parameter, const std::vector<std::string>& layout,
                      const std::string& tensor_axis) {
  if (static_cast<std::int64_t>(layout.size()) != parameter.dim()) {
    throw InvalidArgument(text("LayoutMap: the layout ", shown(layout), " of ", name, " has ", layout.size(),
                               " dimensions; the parameter has shape ", parameter.sizes()));
  }
  int divided = kWhole;
  for (std::size_t i = 0; i < layout.size(); ++i) {
    if (layout[i].empty()) continue;
    if (layout[i] != tensor_axis) {
      throw InvalidArgument(
          text("LayoutMap: ", name, " is divided along \"", layout[i], "\"; it can be along \"", tensor_axis, "\""));
    }
    if (divided != kWhole)
      throw InvalidArgument(text("LayoutMap: the layout ", shown(layout), " of ", name, " divides two dimensions"));
    divided = static_cast<int>(i);
  }
  return divided;
}

ParallelStyle style_of(const torch::nn::Module& module, int dimension) {
  const ColwiseParallel colwise{.output = Replicate()};
  const RowwiseParallel of_linear{.input = Replicate()};
  if (module.as<torch::nn::EmbeddingImpl>() != nullptr)
    return dimension == 0 ? ParallelStyle(RowwiseParallel()) : ParallelStyle(colwise);
  return dimension == 0 ? ParallelStyle(colwise) : ParallelStyle(of_linear);
}

}  // namespace

ParallelPlan plan_of(const LayoutMap& map, const torch::nn::Module& module, const std::string& tensor_axis) {
  ParallelPlan plan;
  std::map<std::string, std::string> of_biases;  // by their layers: those that the map divides
  const auto parameters = module.named_parameters();
  auto modules = module.named_modules("", /*include_self=*/false);
  for (const auto& [pattern, layout] : map) {
    bool any = false;
    for (const auto& each : parameters) {
      const auto& name = each.key();
      if (!matches(pattern, name)) continue;
      any = true;
      const auto dimension = divided_dimension(name, each.value(), layout, tensor_axis);
      if (dimension == kWhole) continue;
      const auto dot = name.rfind('.');
      const auto layer = dot == std::string::npos ? "" : name.substr(0, dot);
      const auto own = dot == std::string::npos ? name : name.substr(dot + 1);
      if (own == "bias") {
        of_biases[layer] = name;
      } else if (own == "weight" && each.value().dim() == 2) {
        const auto* const found = modules.find(layer);
        plan.emplace_back(layer, style_of(found == nullptr ? module : **found, dimension));
      } else {
        throw InvalidArgument(text("LayoutMap: ", name, ", of shape ", each.value().sizes(),
                                   ", cannot be divided; weights and biases of linear layers, and embeddings, can"));
      }
    }
    if (!any) {
      throw InvalidArgument(
          text("LayoutMap: no parameter is called \"", pattern, "\"; ", suggestion(pattern, parameters.keys())));
    }
  }
  for (const auto& [layer, bias] : of_biases) {
    const auto is_colwise = [&, &name = layer](const auto& entry) {
      return entry.first == name && std::holds_alternative<ColwiseParallel>(entry.second);
    };
    if (std::ranges::none_of(plan, is_colwise))
      throw InvalidArgument(text("LayoutMap: ", bias, " is divided, but not the outputs of its layer's weight"));
  }
  return plan;
}

}  // namespace lockstep::parallel
