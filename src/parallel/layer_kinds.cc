#include "parallel/layer_measurements.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <typeinfo>

#include "base/text.h"
#include "gradient/parameter_parts.h"
#include "parallel/gradients.h"
#include "parallel/mesh_backend.h"
#include "parallel/pipeline_run.h"
#include "parallel/plan_entries.h"

namespace lockstep::parallel {

namespace {

// Layers with one identity cost the same. `module` has the layer as its only child, called by its number.
std::string identity(const torch::nn::Module& module, const Tensor& x, const Tensor& output,
                     const ParallelPlan& entries) {
  const auto layer = module.children().front();
  auto lines = text(x.sizes(), " ", x.scalar_type(), " to ", output.sizes(), " ", output.scalar_type(), "\n");
  for (const auto& each : layer->named_modules()) {
    const auto& part = *each.value();
    lines += text(each.key(), " ", typeid(part).name(), "\n");
  }
  for (const auto& each : layer->named_parameters()) {
    lines += gradient::description_line(each.key(), each.value());
  }
  for (const auto& entry : entries) lines += entry.first + "\n";
  return lines;
}

// The kind of layer `i`, divided over the ranks; `x` becomes the layer's output. Adds the patterns of the tensor plan
// that match something in the layer to `used`.
LayerKind kind_of(const MeasureInput& input, std::size_t i, const Communicator& ranks, std::set<std::string>& used,
                  Tensor& x) {
  const auto module = input.layers[i].make();
  LayerKind kind{.layer = i, .sample = x};
  if (ranks.size() > 1) {
    kind.entries = entries_for(*module, input.options.tensor, used);
    parallelize_module(*module, ranks, kind.entries);
  }
  x = input.layers[i].forward(*module, x);
  if (!x.is_floating_point()) {
    throw InvalidArgument(text("plan_parallel: the output of layer ", i, " is of ", x.scalar_type(),
                               "; it must be floating-point, or no gradient could come back"));
  }
  // The first layer's input needs no gradient, and the last one has the loss.
  kind.identity = text(i == 0, input.is_last(i), " ", identity(*module, kind.sample, x, kind.entries));
  for (const auto& each : unique(module->parameters())) {
    const auto bytes = static_cast<double>(each.nbytes());
    kind.parameter_bytes += bytes;
    if (each.requires_grad()) kind.trained_bytes += bytes;
  }
  return kind;
}

}  // namespace

Tensor LayerKind::input(const MeasureInput& of, std::int64_t examples) const {
  if (layer == 0) return of.x.narrow(0, 0, examples);
  const auto rows = sample.size(0) / of.fewest_examples * examples;
  auto repeats = std::vector<std::int64_t>(static_cast<std::size_t>(sample.dim()), 1);
  repeats[0] = (rows + sample.size(0) - 1) / sample.size(0);
  return sample.repeat(repeats).narrow(0, 0, rows).contiguous();
}

double LayerKinds::parameter_bytes() const {
  double sum = 0;
  for (const auto kind : of_layers) sum += kinds[kind].parameter_bytes;
  return sum;
}

LayerKinds find_kinds(const MeasureInput& input, int tensor) {
  const at::NoGradGuard no_gradient;
  const Rehearsal rehearsal(tensor);
  std::set<std::string> used;
  LayerKinds found;
  try {
    auto x = input.x.narrow(0, 0, input.fewest_examples);
    for (std::size_t i = 0; i < input.layers.size(); ++i) {
      auto kind = kind_of(input, i, rehearsal.ranks(), used, x);
      const auto same =
          std::ranges::find_if(found.kinds, [&](const auto& other) { return other.identity == kind.identity; });
      found.of_layers.push_back(static_cast<std::size_t>(same - found.kinds.begin()));
      if (same == found.kinds.end()) found.kinds.push_back(std::move(kind));
    }
  } catch (const std::exception& error) {
    if (tensor == 1) throw;
    return {.refused = first_line(error)};
  }
  if (tensor > 1) check_all_used(input.options.tensor, used, "plan_parallel");
  return found;
}

LayerTrial::LayerTrial(const MeasureInput& input, const LayerKind& kind, Sharding sharding, const Communicator& tensor,
                       const Communicator& data)
    : input_(input), kind_(kind), sharding_(sharding), tensor_(tensor), module_(input.layers[kind.layer].make()) {
  if (tensor_.size() > 1) parallelize_module(*module_, tensor_, kind.entries);
  parameters_ = unique(module_->parameters());
  for (const auto& parameter : parameters_) {
    if (parameter.dim() == 2) ops::add_hook(parameter, std::make_shared<SplitWeight>(parameter));
  }
  std::erase_if(parameters_, [](const auto& parameter) { return !parameter.requires_grad(); });
  if (sharding == Sharding::none) return;
  sharded_.emplace(data, FullyShardOptions{.reshard_after_forward = sharding == Sharding::parameters});
  sharded_->add(*module_, "layer");
  parameters_ = sharded_->parameters();
}

void LayerTrial::forward(const Tensor& x, std::int64_t examples) {
  const auto leaf = kind_.layer > 0 && x.is_floating_point() ? x.detach().requires_grad_() : x;
  output_ = last_ = input_.layers[kind_.layer].forward(*module_, leaf);
  if (input_.is_last(kind_.layer)) last_ = input_.loss(output_, input_.target.narrow(0, 0, examples), tensor_);
}

void LayerTrial::reshard() {
  if (sharding_ == Sharding::parameters) sharded_->release();
}

void LayerTrial::backward_input() {
  if (!last_.requires_grad()) return;
  const auto gradient = last_.dim() == 0 ? Tensor() : at::ones_like(last_);
  const auto leaving = leave_weights_to(sharded_ ? nullptr : weights_);
  torch::autograd::backward({last_}, {gradient});
  output_ = last_ = Tensor();
}

void LayerTrial::backward_weight() { weights_->compute(); }

void LayerTrial::zero_grad() const {
  for (const auto& parameter : parameters_) parameter.mutable_grad() = Tensor();
}

}  // namespace lockstep::parallel
