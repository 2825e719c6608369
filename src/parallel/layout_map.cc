#include "parallel/layout_map.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <map>

#include "base/text.h"
#include "parallel/name_pattern.h"

namespace lockstep::parallel {
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
    if (std::none_of(plan.begin(), plan.end(), is_colwise))
      throw InvalidArgument(text("LayoutMap: ", bias, " is divided, but not the outputs of its layer's weight"));
  }
  return plan;
}

}  // namespace lockstep::parallel
