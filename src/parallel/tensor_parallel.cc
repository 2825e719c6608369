#include "lockstep/parallel/tensor_parallel.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <set>

#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "parallel/divided_parameter.h"
#include "parallel/equal_gradients.h"
#include "parallel/plan_entries.h"

namespace lockstep {
namespace {

using parallel::DividedFor;
using parallel::DividedParameter;
using parallel::DividedWeight;

// The change that a plan makes to one parameter.
struct Change {
  std::string name;
  Tensor parameter;
  std::shared_ptr<ops::ParameterHook> hook;

  const DividedParameter* division() const { return dynamic_cast<const DividedParameter*>(hook.get()); }
};

class Planner {
 public:
  Planner(torch::nn::Module& module, const Communicator& ranks)
      : module_(module), ranks_(ranks), number_(ranks.group().next_number() + 1) {
    for (const auto& each : module.named_modules("", /*include_self=*/false))
      modules_.push_back({each.key(), each.value().get()});
    modules_.push_back({"", &module});
  }

  std::vector<Change> changes(const ParallelPlan& plan) {
    for (const auto& [pattern, style] : plan) std::visit([&, &p = pattern](const auto& s) { add(p, s); }, style);
    return std::move(changes_);
  }

 private:
  struct Found {
    std::string name;
    torch::nn::Module* module;
  };

  template <class Style>
  void add(const std::string& pattern, const Style& style) {
    const auto matches = [&](const Found& found) { return parallel::matches(pattern, found.name); };
    if (std::ranges::none_of(modules_, matches))
      fail_no_match(pattern, "module", module_.named_modules("", /*include_self=*/false).keys());
    for (const auto& found : modules_) {
      if (matches(found)) add_module(found, style);
    }
  }

  void add(const std::string& pattern, const Shard& style) {
    bool any = false;
    for (const auto& each : module_.named_parameters()) {
      if (!parallel::matches(pattern, each.key())) continue;
      any = true;
      check_dim(each.key(), each.value(), style.dim);
      const parallel::Division division{.dim = style.dim < 0 ? style.dim + each.value().dim() : style.dim};
      const DividedFor what{each.key(), each.key(), "Shard"};
      add_change(each.key(), each.value(),
                 std::make_shared<DividedParameter>(what, division, each.value(), ranks_for(each.key()),
                                                    parallel::OtherOperators::on_part));
    }
    if (!any) fail_no_match(pattern, "parameter", module_.named_parameters().keys());
  }

  template <class Style>
  void add_module(const Found& found, const Style& style) {
    const auto weight = weight_of(found, name_of(style));
    const auto name = name_in(found, "weight");
    const DividedFor what{found.name, name, name_of(style)};
    const auto* const embedding = found.module->as<torch::nn::EmbeddingImpl>();
    if (embedding != nullptr) check_embedding(found.name, embedding->options);
    add_change(name, weight,
               std::make_shared<DividedWeight<Style>>(what, weight, style, embedding != nullptr, ranks_for(name)));
    if (const auto bias = bias_of(found); embedding == nullptr && bias.defined()) add_bias(found, bias, style);
  }

  void add_module(const Found& found, const ReplicateParallel& style) {
    const auto weight = weight_of(found, "ReplicateParallel");
    if (found.module->as<torch::nn::EmbeddingImpl>() != nullptr)
      throw InvalidArgument(
          text("parallelize_module: ", found.name, " is an embedding: ReplicateParallel is for ", "linear layers"));
    add_change(
        name_in(found, "weight"), weight,
        std::make_shared<parallel::SharedLinear>(found.name, weight, style, ranks_for(name_in(found, "weight"))));
    if (const auto bias = bias_of(found); bias.defined())
      add_change(name_in(found, "bias"), bias,
                 std::make_shared<parallel::SequencePart>(name_in(found, "bias"), ranks_,
                                                          parallel::SequencePart::Of::replicate_parallel));
  }

  // Takes the weight that the layer uses: `head->weight = embedding->weight` leaves the registered parameter without
  // use.
  Tensor weight_of(const Found& found, const char* style) const {
    const auto parameters = found.module->named_parameters(/*recurse=*/false);
    const auto* const registered = parameters.find("weight");
    if (registered == nullptr || registered->dim() != 2) {
      throw InvalidArgument(text("parallelize_module: ", found.name, " has no weight of two dimensions: ", style,
                                 " is for linear layers and embeddings"));
    }
    Tensor used = *registered;
    if (const auto* const linear = found.module->as<torch::nn::LinearImpl>()) used = linear->weight;
    if (const auto* const embedding = found.module->as<torch::nn::EmbeddingImpl>()) used = embedding->weight;
    if (used.is_same(*registered)) return used;
    const auto all = module_.parameters();
    if (std::ranges::any_of(all, [&](const auto& each) { return each.is_same(used); })) return used;
    throw InvalidArgument(text("parallelize_module: ", found.name, " has a weight in the place of its parameter \"",
                               name_in(found, "weight"), "\", which is no parameter of the module"));
  }

  static Tensor bias_of(const Found& found) {
    const auto parameters = found.module->named_parameters(/*recurse=*/false);
    const auto* const bias = parameters.find("bias");
    return bias == nullptr ? Tensor() : *bias;
  }

  void add_module(const Found& found, const SequenceParallel&) {
    for (const auto& each : found.module->named_parameters()) {
      const auto name = name_in(found, each.key());
      add_change(name, each.value(), std::make_shared<parallel::SequencePart>(name, ranks_for(name)));
    }
  }

  static void check_embedding(const std::string& name, const torch::nn::EmbeddingOptions& options) {
    if (!options.padding_idx() && !options.max_norm() && !options.scale_grad_by_freq()) return;
    throw InvalidArgument(
        text("parallelize_module: the embedding ", name,
             " has padding_idx, max_norm or scale_grad_by_freq, which are for the whole; leave them out"));
  }

  void add_bias(const Found& layer, const Tensor& bias, const ColwiseParallel& style) {
    const DividedFor what{layer.name, name_in(layer, "bias"), name_of(style)};
    add_change(what.parameter, bias,
               std::make_shared<parallel::DividedBias>(what, bias, style, ranks_for(what.parameter)));
  }

  void add_bias(const Found& layer, const Tensor& bias, const RowwiseParallel& style) {
    if (std::holds_alternative<Replicate>(style.output)) return;
    const auto name = name_in(layer, "bias");
    add_change(
        name, bias,
        std::make_shared<parallel::SequencePart>(name, ranks_for(name), parallel::SequencePart::Of::rowwise_parallel));
  }

  void add_change(const std::string& name, const Tensor& parameter, std::shared_ptr<ops::ParameterHook> hook) {
    Change change{name, parameter, std::move(hook)};
    if (parallel::has_style(parameter))
      throw InvalidArgument(text("parallelize_module: ", name, " has a style already"));
    if (!ops::has_values(parameter))
      throw InvalidArgument(text("parallelize_module: ", name, " has no values: divide before fully_shard"));
    for (const auto& other : changes_) {
      if (!other.parameter.is_same(parameter)) continue;
      const bool are_tied = other.name != name && other.division() != nullptr && change.division() != nullptr;
      if (are_tied) continue;
      throw InvalidArgument(text("parallelize_module: two entries of the plan are for ", name));
    }
    if (const auto* const division = change.division()) check_division(change, division->division());
    changes_.push_back(std::move(change));
  }

  void check_division(const Change& change, const parallel::Division& division) {
    const auto size = change.parameter.size(division.dim);
    if (size % (division.blocks * ranks_.size()) != 0) {
      const auto blocks = division.blocks == 1 ? "" : text(" in ", division.blocks, " parts");
      throw InvalidArgument(text("parallelize_module: dimension ", division.dim, " of ", change.name, ", of size ",
                                 size, ", cannot be divided", blocks, " among ", ranks_.size(), " ranks"));
    }
    for (const auto& other : changes_) {
      if (!other.parameter.is_same(change.parameter) || other.division() == nullptr) continue;
      const auto& theirs = other.division()->division();
      if (theirs.dim == division.dim && theirs.blocks == division.blocks) continue;
      throw InvalidArgument(text("parallelize_module: ", other.name, " and ", change.name,
                                 " are one parameter, but the plan divides it along dimension ", theirs.dim,
                                 " for the one and ", division.dim, " for the other"));
    }
  }

  static void check_dim(const std::string& name, const Tensor& parameter, std::int64_t dim) {
    if (dim >= -parameter.dim() && dim < parameter.dim()) return;
    throw InvalidArgument(
        text("parallelize_module: Shard{", dim, "} of ", name, ", which has shape ", parameter.sizes()));
  }

  // The result's calls are for one parameter of this model.
  Communicator ranks_for(const std::string& parameter) const {
    return ranks_.with_purpose(Purpose(text(parameter, " in parallelize_module ", number_)));
  }

  static std::string name_in(const Found& module, const std::string& parameter) {
    return module.name.empty() ? parameter : module.name + "." + parameter;
  }

  static const char* name_of(const ColwiseParallel&) { return "ColwiseParallel"; }
  static const char* name_of(const RowwiseParallel&) { return "RowwiseParallel"; }

  [[noreturn]] static void fail_no_match(const std::string& pattern, const char* what,
                                         const std::vector<std::string>& names) {
    throw InvalidArgument(
        text("parallelize_module: no ", what, " is called \"", pattern, "\"; ", parallel::suggestion(pattern, names)));
  }

  torch::nn::Module& module_;
  const Communicator& ranks_;
  const std::int64_t number_;
  std::vector<Found> modules_;
  std::vector<Change> changes_;
};

void apply(const std::vector<Change>& changes, const Communicator& ranks) {
  std::vector<const at::TensorImpl*> divided;
  for (const auto& change : changes) {
    const auto* const division = change.division();
    const auto is_done = std::ranges::find(divided, change.parameter.unsafeGetTensorImpl()) != divided.end();
    if (division == nullptr || is_done) continue;
    divided.push_back(change.parameter.unsafeGetTensorImpl());
    change.parameter.set_data(parallel::divided(change.parameter, division->division(), ranks));
    change.parameter.mutable_grad() = Tensor();
  }
  for (const auto& change : changes) ops::add_hook(change.parameter, change.hook);
}

std::string describe(const Layout& layout) {
  return std::holds_alternative<Replicate>(layout) ? "Replicate" : text("Shard{", std::get<Shard>(layout).dim, "}");
}
std::string describe(const ColwiseParallel& style) {
  return text("ColwiseParallel{", describe(style.input), ", ", describe(style.output), ", ", style.parts, "}");
}
std::string describe(const RowwiseParallel& style) {
  return text("RowwiseParallel{", describe(style.input), ", ", describe(style.output),
              style.divided_logits ? ", divided_logits}" : "}");
}
std::string describe(const SequenceParallel&) { return "SequenceParallel"; }
std::string describe(const ReplicateParallel& style) { return text("ReplicateParallel{", describe(style.input), "}"); }
std::string describe(const Shard& style) { return describe(Layout(style)); }

// False for a plan of Shard alone, with which ranks may have other activations, such as other positions.
bool has_styles_of_layers(const ParallelPlan& plan) {
  return std::ranges::any_of(plan, [](const auto& entry) { return !std::holds_alternative<Shard>(entry.second); });
}

// Prints the facts that ranks must agree on.
std::string description(torch::nn::Module& module, const ParallelPlan& plan) {
  std::string lines;
  for (const auto& each : module.named_parameters()) {
    lines += gradient::description_line(each.key(), each.value());
  }
  for (const auto& each : module.named_buffers()) {
    lines += text("buffer ", each.key(), " ", each.value().scalar_type(), " ", each.value().sizes(), "\n");
  }
  for (const auto& [pattern, style] : plan) {
    lines += text("\"", pattern, "\": ", std::visit([](const auto& s) { return describe(s); }, style), "\n");
  }
  return lines;
}

}  // namespace

void parallelize_module(torch::nn::Module& module, const Communicator& ranks, const ParallelPlan& plan) {
  ranks.check_all_agree("parameters and plans of parallelize_module", description(module, plan));
  const auto changes = Planner(module, ranks).changes(plan);
  auto tensors = module.buffers();
  for (const auto& parameter : module.parameters()) {
    if (!parallel::has_style(parameter)) tensors.push_back(parameter);  // else an earlier call has divided it
  }
  broadcast(ranks.with_purpose(Purpose("the first values of parallelize_module")), tensors);
  apply(changes, ranks);
  if (!has_styles_of_layers(plan)) return;
  std::set<const at::TensorImpl*> watched;  // a layer may be registered twice
  for (const auto& each : module.named_parameters()) {
    if (!each.value().requires_grad() || parallel::has_style(each.value())) continue;
    if (watched.insert(each.value().unsafeGetTensorImpl()).second)
      parallel::watch_gradients(each.value(), each.key(), ranks);
  }
}

Tensor full_tensor(const Tensor& parameter) {
  const auto division = parallel::division_of(parameter);
  return division != nullptr ? division->whole(parameter) : parameter.detach().clone();
}

}  // namespace lockstep
