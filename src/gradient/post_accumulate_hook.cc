#include "gradient/post_accumulate_hook.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

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

}  // namespace lockstep::gradient
