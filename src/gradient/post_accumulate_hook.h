// A hook of autograd that runs after a parameter's gradient was accumulated.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace lockstep::gradient {

// Calls `function` each time that a backward has accumulated the parameter's gradient, in the thread of that backward,
// until this object is destroyed or a later one is made for the same parameter. As PyTorch's
// Tensor.register_post_accumulate_grad_hook, of which C++ has one a parameter. Not while a backward runs.
class PostAccumulateHook {
 public:
  PostAccumulateHook(at::Tensor parameter, std::function<void()> function);
  ~PostAccumulateHook();
  PostAccumulateHook(PostAccumulateHook&&) = default;
  PostAccumulateHook& operator=(PostAccumulateHook&&) = delete;

 private:
  class Hook;
  at::Tensor parameter_;
  std::shared_ptr<const std::function<void()>> function_;  // shared with the Hook, which it identifies
};

}  // namespace lockstep::gradient
