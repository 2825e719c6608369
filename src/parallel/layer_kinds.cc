#include "parallel/layer_measurements.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include <map>
#include <typeinfo>

#include "base/text.h"
#include "parallel/gradients.h"
#include "parallel/mesh_backend.h"
#include "parallel/plan_entries.h"
#include "parallel/split_linear.h"

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
    lines += text(each.key(), " ", each.value().scalar_type(), " ", each.value().sizes(),
                  each.value().requires_grad() ? "" : " frozen", "\n");
  }
  for (const auto& entry : entries) lines += entry.first + "\n";
  return lines;
}

class KindFinder {
 public:
  KindFinder(const MeasureInput& input, int tensor) : input_(input), tensor_(tensor) {}

  LayerKinds find() && {
    try {
      pass_all();
    } catch (const std::exception& error) {
      if (tensor_ == 1) throw;
      return {.refused = first_line(error)};
    }
    if (tensor_ > 1) check_all_used(input_.options.tensor, used_, "plan_parallel");
    return std::move(found_);
  }

 private:
  void pass_all() {
    const at::NoGradGuard no_gradient;
    auto x = input_.x.narrow(0, 0, input_.fewest_examples);
    for (std::size_t i = 0; i < input_.layers.size(); ++i) x = pass(i, x);
  }

  // Returns the layer's output.
  Tensor pass(std::size_t i, const Tensor& x) {
    const auto module = input_.layers[i].make();
    const auto entries = tensor_ == 1 ? ParallelPlan() : entries_for(*module, input_.options.tensor, used_);
    if (tensor_ > 1) parallelize_module(*module, rehearsal_.ranks(), entries);
    const auto output = input_.layers[i].forward(*module, x);
    if (!output.is_floating_point()) {
      throw InvalidArgument(text("plan_parallel: the output of layer ", i, " is of ", output.scalar_type(),
                                 "; it must be floating-point, or no gradient could come back"));
    }
    // The first layer's input needs no gradient, and the last one has the loss.
    const auto key = text(i == 0, input_.is_last(i), " ", identity(*module, x, output, entries));
    const auto [number, is_new] = numbers_.try_emplace(key, found_.kinds.size());
    found_.of_layers.push_back(number->second);
    if (is_new) {
      LayerKind kind{.layer = i, .entries = entries, .sample = x};
      for (const auto& each : unique(module->parameters())) {
        const auto bytes = static_cast<double>(each.nbytes());
        kind.parameter_bytes += bytes;
        if (each.requires_grad()) kind.trained_bytes += bytes;
      }
      found_.kinds.push_back(std::move(kind));
    }
    return output;
  }

  const MeasureInput& input_;
  const int tensor_;
  const Rehearsal rehearsal_{tensor_};
  std::set<std::string> used_;  // patterns of the tensor plan
  LayerKinds found_;
  std::map<std::string, std::size_t> numbers_;
};

}  // namespace

std::string first_line(const std::exception& error) {
  const std::string all = error.what();
  return all.substr(0, all.find('\n'));
}

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

LayerKinds find_kinds(const MeasureInput& input, int tensor) { return KindFinder(input, tensor).find(); }

struct LayerTrial::Backward {
  WeightGradients weights;
};

LayerTrial::LayerTrial(const PipelineStage& stage, const ParallelPlan& entries, Sharding sharding,
                       const TrialGroups& groups)
    : stage_(stage),
      sharding_(sharding),
      tensor_(groups.tensor),
      module_(stage.make()),
      backward_(std::make_unique<Backward>()) {
  if (tensor_.size() > 1) parallelize_module(*module_, tensor_, entries);
  parameters_ = unique(module_->parameters());
  for (const auto& parameter : parameters_) {
    if (parameter.dim() == 2) ops::add_hook(parameter, std::make_shared<SplitWeight>(parameter));
  }
  std::erase_if(parameters_, [](const auto& parameter) { return !parameter.requires_grad(); });
  if (sharding == Sharding::none) return;
  sharded_.emplace(groups.data, FullyShardOptions{.reshard_after_forward = sharding == Sharding::parameters});
  sharded_->add(*module_, "layer");
  parameters_ = sharded_->parameters();
}

LayerTrial::~LayerTrial() = default;

void LayerTrial::forward(const Tensor& x) { output_ = last_ = stage_.forward(*module_, x); }

void LayerTrial::forward(const Tensor& x, const Tensor& target, const SplitLoss& loss) {
  forward(x);
  last_ = loss(output_, target, tensor_);
}

void LayerTrial::reshard() {
  if (sharding_ == Sharding::parameters) sharded_->release();
}

void LayerTrial::backward_input() {
  if (!last_.requires_grad()) return;
  const auto gradient = last_.dim() == 0 ? Tensor() : at::ones_like(last_);
  std::optional<WeightGradients::Collect> collect;
  if (!sharded_) collect.emplace(backward_->weights);
  torch::autograd::backward({last_}, {gradient});
  output_ = last_ = Tensor();
}

void LayerTrial::backward_weight() { backward_->weights.compute(); }

void LayerTrial::zero_grad() const {
  for (const auto& parameter : parameters_) parameter.mutable_grad() = Tensor();
}

}  // namespace lockstep::parallel
