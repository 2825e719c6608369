#include "gradient/gradient_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "ops/gradient_memory.h"

namespace lockstep::gradient {

class GradientHooks::Hook final : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(GradientHooks& hooks, int replica, std::size_t slot) : hooks_(hooks), replica_(replica), slot_(slot) {}
  void operator()(const at::Tensor&) override {
    if (hooks_.expects_backward_[static_cast<std::size_t>(replica_)].set) hooks_.take(replica_, slot_);
  }
  bool belongs_to(const GradientHooks& hooks) const { return &hooks_ == &hooks; }

 private:
  GradientHooks& hooks_;
  const int replica_;
  const std::size_t slot_;
};

void GradientHooks::install() {
  if (!hooked_.empty() || !sync_.during_backward()) return;
  for (int replica = 0; replica < parameters_.replicas(); ++replica) {
    for (std::size_t i = 0; i < parameters_.slots().size(); ++i) {
      if (!parameters_.slots()[i].trainable) continue;
      const auto& parameter = hooked_.emplace_back(parameters_.parameter(replica, i));
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>(*this, replica, i));
    }
  }
}

// Another optimizer of the same parameters may have replaced these hooks.
GradientHooks::~GradientHooks() {
  ops::clear_gradient_memory();
  for (const auto& parameter : hooked_) {
    const auto* const hook = dynamic_cast<Hook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
    if (hook != nullptr && hook->belongs_to(*this)) {
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
    }
  }
}

void GradientHooks::expect_one_backward(int replica) {
  if (hooked_.empty()) return;
  expects_backward_[static_cast<std::size_t>(replica)].set = true;
  for (std::size_t i = 0; i < parameters_.slots().size(); ++i) {
    if (!torch::autograd::impl::hooks(parameters_.parameter(replica, i)).empty()) continue;  // may keep the gradient
    auto memory = sync_.memory_for(replica, i);
    if (memory.defined()) ops::offer_gradient_memory(parameters_.parameter(replica, i).const_data_ptr(), memory);
  }
}

void GradientHooks::take_all(int replica) {
  expects_backward_[static_cast<std::size_t>(replica)].set = false;
  ops::clear_gradient_memory();
  sync_.forget(replica);
  for (std::size_t i = 0; i < parameters_.slots().size(); ++i) {
    if (!sync_.is_ready(replica, i)) take(replica, i);
  }
}

void GradientHooks::take(int replica, std::size_t index) {
  const auto& slot = parameters_.slots()[index];
  auto gradient = std::exchange(parameters_.parameter(replica, index).mutable_grad(), at::Tensor());
  if (!sync_.takes(index) || !gradient.defined()) return;
  if (gradient.is_sparse()) gradient = gradient.to_dense();
  if (gradient.scalar_type() != slot.dtype || gradient.sizes() != slot.sizes) {
    throw InvalidArgument(text("the gradient of \"", slot.name, "\" is ", gradient.scalar_type(), " ", gradient.sizes(),
                               "; the parameter is ", slot.dtype, " ", at::IntArrayRef(slot.sizes)));
  }
  const bool stays = parameters_.placement() == Placement::device && !sync_.during_backward();
  sync_.on_ready(replica, index, (stays ? gradient : gradient.to(at::kCPU)).contiguous());
}

void GradientHooks::drop(int replica) {
  expects_backward_[static_cast<std::size_t>(replica)].set = false;
  for (std::size_t i = 0; i < parameters_.slots().size(); ++i) {
    parameters_.parameter(replica, i).mutable_grad().reset();
  }
  ops::clear_gradient_memory();
  sync_.forget(replica);
}

}  // namespace lockstep::gradient
