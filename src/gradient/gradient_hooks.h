// Hands gradients over from autograd to a Reduction.
#pragma once

#include <ATen/core/Tensor.h>
#include <functional>
#include <memory>
#include <vector>

#include "gradient/reduction.h"
#include "gradient/replicated_parameters.h"

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

// Leaves parameters without a gradient, so that the next backward makes a new tensor instead of adding to the old one.
// All calls for a replica come from its thread.
class GradientHooks {
 public:
  GradientHooks(ReplicatedParameters& parameters, Reduction& reduction);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Registers hooks on the parameters where gradients are added during backward. Not while a replica runs.
  void install();

  // The replica's next backward is the only one of this step, so its gradients may be sent while it runs. Ends with
  // take_all.
  void expect_one_backward(int replica);

  // Hands over the remaining gradients. Discards those that a failed step handed over. Throws InvalidArgument for a
  // gradient of another dtype or shape than its parameter.
  void take_all(int replica);

  // Discards the gradients of an earlier backward, and those that were handed over.
  void drop(int replica);

 private:
  // A replica's, a cache line apart.
  struct alignas(64) Step {
    bool begun = false;
    bool expects_backward = false;
    std::vector<char> added;  // [slot]: whether the reduction has the gradient
  };
  Step& of(int replica) { return steps_[static_cast<std::size_t>(replica)]; }
  void begin(int replica);
  void require_as_first(int replica) const;
  void add(int replica, std::size_t slot);

  ReplicatedParameters& parameters_;
  Reduction& reduction_;
  std::vector<char> takes_;                // [slot]: whether it was trainable when this was made
  std::vector<Step> steps_;                // [replica]
  std::vector<PostAccumulateHook> hooks_;  // last: removed before what they use
};

}  // namespace lockstep::gradient
