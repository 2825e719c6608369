#include "gradient/gradient_hooks.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "ops/gradient_memory.h"
#include "ops/watching_hook.h"

namespace lockstep::gradient {

void GradientHooks::install() {
  if (!hooks_.empty() || !sync_.during_backward()) return;
  for (int replica = 0; replica < parameters_.replicas(); ++replica) {
    for (std::size_t i = 0; i < parameters_.slots().size(); ++i) {
      if (!parameters_.slots()[i].trainable) continue;
      hooks_.emplace_back(parameters_.parameter(replica, i), [this, replica, i] {
        if (expects_backward_[static_cast<std::size_t>(replica)].set) take(replica, i);
      });
    }
  }
}

GradientHooks::~GradientHooks() { ops::clear_gradient_memory(); }

void GradientHooks::expect_one_backward(int replica) {
  if (hooks_.empty()) return;
  expects_backward_[static_cast<std::size_t>(replica)].set = true;
  for (std::size_t i = 0; i < parameters_.slots().size(); ++i) {
    if (ops::may_keep_gradient(parameters_.parameter(replica, i))) continue;
    auto memory = sync_.memory_for(replica, i);
    if (memory.defined()) ops::offer_gradient_memory(parameters_.parameter(replica, i).const_data_ptr(), memory);
  }
}

void GradientHooks::take_all(int replica) {
  expects_backward_[static_cast<std::size_t>(replica)].set = false;
  ops::clear_gradient_memory();
  if (!sync_.during_backward()) sync_.forget(replica);
  require_as_first(replica);
  for (std::size_t i = 0; i < parameters_.slots().size(); ++i) {
    if (!sync_.is_ready(replica, i)) take(replica, i);
  }
}

// A parameter that is frozen on one replica alone would be trained by the gradients of the others' examples.
void GradientHooks::require_as_first(int replica) const {
  for (std::size_t i = 0; replica > 0 && i < parameters_.slots().size(); ++i) {
    if (parameters_.parameter(replica, i).requires_grad() == parameters_.parameter(0, i).requires_grad()) continue;
    throw InvalidArgument(text("parameter \"", parameters_.slots()[i].name, "\" is frozen on some replicas only: ",
                               "change requires_grad on all, or between fits, where replica 0's holds for all"));
  }
}

void GradientHooks::take(int replica, std::size_t index) {
  const auto& slot = parameters_.slots()[index];
  auto gradient = std::exchange(parameters_.parameter(replica, index).mutable_grad(), at::Tensor());
  if (gradient.defined() && !slot.trainable) parameters_.require_known_trainable();
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
