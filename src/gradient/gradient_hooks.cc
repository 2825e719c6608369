#include "gradient/gradient_hooks.h"

#include <torch/csrc/autograd/variable.h>

#include <torch/csrc/autograd/function_hook.h>
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "ops/fast.h"
#include "ops/watching_hook.h"

namespace lockstep::gradient {

class PostAccumulateHook::Hook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit Hook(std::shared_ptr<const std::function<void()>> function) : function_(std::move(function)) {}
  void operator()(const at::Tensor&) override { (*function_)(); }
  bool calls(const std::shared_ptr<const std::function<void()>>& function) const { return function_ == function; }

 private:
  const std::shared_ptr<const std::function<void()>> function_;
};

PostAccumulateHook::PostAccumulateHook(at::Tensor parameter, std::function<void()> function)
    : parameter_(std::move(parameter)), function_(std::make_shared<const std::function<void()>>(std::move(function))) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter_, std::make_unique<Hook>(function_));
}

PostAccumulateHook::~PostAccumulateHook() {
  if (function_ == nullptr) return;  // moved from
  if (is_in_place()) torch::autograd::impl::set_post_acc_grad_hooks(parameter_, nullptr);
}

bool PostAccumulateHook::is_in_place() const {
  const auto* const hook = dynamic_cast<Hook*>(torch::autograd::impl::post_acc_grad_hooks(parameter_).get());
  return hook != nullptr && hook->calls(function_);
}

GradientHooks::GradientHooks(ReplicatedParameters& parameters, Reduction& reduction)
    : parameters_(parameters), reduction_(reduction), steps_(static_cast<std::size_t>(parameters.replicas())) {
  for (const auto& slot : parameters.slots()) takes_.push_back(slot.trainable);
  for (auto& step : steps_) step.added.resize(takes_.size());
}

GradientHooks::~GradientHooks() { ops::clear_gradient_memory(); }

void GradientHooks::install() {
  if (!hooks_.empty() || !reduction_.during_backward()) return;
  for (int replica = 0; replica < parameters_.replicas(); ++replica) {
    for (std::size_t i = 0; i < takes_.size(); ++i) {
      if (!takes_[i]) continue;
      hooks_.emplace_back(parameters_.parameter(replica, i), [this, replica, i] {
        if (of(replica).expects_backward) add(replica, i);
      });
    }
  }
}

void GradientHooks::begin(int replica) {
  auto& step = of(replica);
  if (step.begun) return;
  std::ranges::fill(step.added, false);  // by a step that failed
  reduction_.begin_step(replica);
  step.begun = true;
}

void GradientHooks::expect_one_backward(int replica) {
  if (hooks_.empty()) return;
  begin(replica);
  of(replica).expects_backward = true;
  for (std::size_t i = 0; i < takes_.size(); ++i) {
    if (ops::may_keep_gradient(parameters_.parameter(replica, i))) continue;
    auto memory = reduction_.memory_for(replica, i);
    if (memory.defined()) ops::offer_gradient_memory(parameters_.parameter(replica, i).const_data_ptr(), memory);
  }
}

// The order in which slots are ready is the order of buckets after the first step: those without a gradient come last.
void GradientHooks::take_all(int replica) {
  auto& step = of(replica);
  begin(replica);
  step.begun = step.expects_backward = false;
  ops::clear_gradient_memory();
  require_as_first(replica);
  for (std::size_t i = 0; i < takes_.size(); ++i) {
    if (!step.added[i]) add(replica, i);
  }
  for (std::size_t i = 0; i < takes_.size(); ++i) {
    if (takes_[i] && !step.added[i]) reduction_.add(replica, i, {});
  }
  std::ranges::fill(step.added, false);
}

// A parameter that is frozen on one replica alone would be trained by the gradients of the others' examples.
void GradientHooks::require_as_first(int replica) const {
  for (std::size_t i = 0; replica > 0 && i < parameters_.slots().size(); ++i) {
    if (parameters_.parameter(replica, i).requires_grad() == parameters_.parameter(0, i).requires_grad()) continue;
    throw InvalidArgument(text("parameter \"", parameters_.slots()[i].name, "\" is frozen on some replicas only: ",
                               "change requires_grad on all, or between fits, where replica 0's holds for all"));
  }
}

// Takes the gradient, if there is one, from the parameter.
void GradientHooks::add(int replica, std::size_t index) {
  const auto& slot = parameters_.slots()[index];
  auto gradient = std::exchange(parameters_.parameter(replica, index).mutable_grad(), at::Tensor());
  if (gradient.defined() && !slot.trainable) parameters_.require_known_trainable();
  if (!takes_[index] || !gradient.defined()) return;
  if (gradient.is_sparse()) gradient = gradient.to_dense();
  if (gradient.scalar_type() != slot.dtype || gradient.sizes() != slot.sizes) {
    throw InvalidArgument(text("the gradient of \"", slot.name, "\" is ", gradient.scalar_type(), " ", gradient.sizes(),
                               "; the parameter is ", slot.dtype, " ", at::IntArrayRef(slot.sizes)));
  }
  reduction_.add(replica, index, gradient.to(reduction_.device(replica)).contiguous());
  of(replica).added[index] = true;
}

void GradientHooks::drop(int replica) {
  auto& step = of(replica);
  step.begun = step.expects_backward = false;
  std::ranges::fill(step.added, false);
  for (std::size_t i = 0; i < parameters_.slots().size(); ++i) {
    parameters_.parameter(replica, i).mutable_grad().reset();
  }
  ops::clear_gradient_memory();
  reduction_.end_step(replica, Reduction::StepEnd::broken_off);
}

}  // namespace lockstep::gradient
