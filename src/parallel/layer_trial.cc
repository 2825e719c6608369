#include "parallel/layer_trial.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include "parallel/gradients.h"
#include "parallel/split_linear.h"

namespace lockstep::parallel {

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
