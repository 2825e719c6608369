// A hook of autograd that runs after a parameter's gradient was accumulated.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace lockstep::gradient {

// Calls `function` each time that a backward has accumulated the parameter's gradient, in the thread of that backward
// (PyTorch's Tensor.register_post_accumulate_grad_hook). LibTorch keeps one such hook for each parameter: a later one
// replaces this one, and this object's destructor then leaves it alone. Construct and destroy it only while no backward
// of the parameter runs.
class PostAccumulateHook {
 public:
  PostAccumulateHook(at::Tensor parameter, std::function<void()> function);
  ~PostAccumulateHook();
  PostAccumulateHook(PostAccumulateHook&&) = default;
  PostAccumulateHook& operator=(PostAccumulateHook&&) = delete;

  // False since a later hook has replaced this one.
  bool is_in_place() const;

 private:
  class Hook;
  at::Tensor parameter_;
  std::shared_ptr<const std::function<void()>> function_;  // shared with the Hook, which it identifies
};

}  // namespace lockstep::gradient
