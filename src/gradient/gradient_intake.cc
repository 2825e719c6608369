// How gradients come from autograd to the update.
#include <ATen/ops/isfinite.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "gradient/update_engine.h"
#include "kernels/update.h"
#include "lockstep/error.h"

namespace lockstep {

// Takes a gradient where autograd leaves it.
class UpdateEngine::Hook final : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(UpdateEngine& engine, int replica, std::size_t slot) : engine_(engine), replica_(replica), slot_(slot) {}
  void operator()(const at::Tensor&) override {
    if (engine_.contributions_[static_cast<std::size_t>(replica_)].expects_backward) {
      engine_.take_gradient(replica_, slot_);
    }
  }
  bool belongs_to(const UpdateEngine& engine) const { return &engine_ == &engine; }

 private:
  UpdateEngine& engine_;
  const int replica_;
  const std::size_t slot_;
};

void UpdateEngine::hook_gradients() {
  for (int replica = 0; replica < parameters_->replicas(); ++replica) {
    for (std::size_t i = 0; i < parameters_->slots().size(); ++i) {
      if (!parameters_->slots()[i].trainable) continue;
      torch::autograd::impl::set_post_acc_grad_hooks(parameters_->parameter(replica, i),
                                                     std::make_unique<Hook>(*this, replica, i));
      hooked_.push_back({replica, i});
    }
  }
}

// Another engine for the same parameters may have its hooks there by now.
UpdateEngine::~UpdateEngine() {
  for (const auto& [replica, slot] : hooked_) {
    const auto& parameter = parameters_->parameter(replica, slot);
    const auto* const hook = dynamic_cast<Hook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
    if (hook != nullptr && hook->belongs_to(*this)) {
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
    }
  }
}

void UpdateEngine::expect_one_backward(int replica) {
  contributions_[static_cast<std::size_t>(replica)].expects_backward = workers_ != nullptr;
}

void UpdateEngine::take_gradients(int replica) {
  auto& mine = contributions_[static_cast<std::size_t>(replica)];
  mine.expects_backward = false;
  for (std::size_t i = 0; i < mine.gradients.size(); ++i) {
    const bool sent = workers_ != nullptr && workers_->given(replica, i);
    if (!sent) take_gradient(replica, i);
  }
}

// Leaves the parameter without a gradient, so that the next backward hands over a tensor of its own instead of adding.
void UpdateEngine::take_gradient(int replica, std::size_t index) {
  auto& taken = contributions_[static_cast<std::size_t>(replica)].gradients[index];
  const auto& slot = parameters_->slots()[index];
  auto gradient = std::exchange(parameters_->parameter(replica, index).mutable_grad(), at::Tensor());
  taken.reset();
  const bool used = workers_ == nullptr ? slot.trainable : workers_->takes(index);
  if (!used || !gradient.defined()) return;
  if (gradient.is_sparse()) gradient = gradient.to_dense();
  if (gradient.scalar_type() != slot.dtype || gradient.sizes() != slot.sizes) {
    throw InvalidArgument(text("the gradient of \"", slot.name, "\" is ", gradient.scalar_type(), " ", gradient.sizes(),
                               "; the parameter is ", slot.dtype, " ", at::IntArrayRef(slot.sizes)));
  }
  const bool stays = device_updates_.empty() ? gradient.is_cpu() : workers_ == nullptr;
  taken = (stays ? gradient : gradient.to(at::kCPU)).contiguous();
  if (workers_ != nullptr) workers_->give(replica, index, taken);
}

void UpdateEngine::drop_gradients(int replica) {
  for (std::size_t i = 0; i < parameters_->slots().size(); ++i)
    parameters_->parameter(replica, i).mutable_grad().reset();
}

bool UpdateEngine::finite_gradients(int replica) const {
  const auto& gradients = contributions_[static_cast<std::size_t>(replica)].gradients;
  return std::all_of(gradients.begin(), gradients.end(), [](const at::Tensor& gradient) {
    const auto squares = [&]<class T>(T) {
      return kernels::update_kernels<T>().sum_of_squares(gradient.const_data_ptr<T>(),
                                                         static_cast<std::size_t>(gradient.numel()));
    };
    if (!gradient.defined()) return true;
    if (!gradient.is_cpu()) return at::isfinite(gradient).all().item<bool>();
    return std::isfinite(gradient.scalar_type() == at::kDouble ? squares(double()) : squares(float()));
  });
}

}  // namespace lockstep
