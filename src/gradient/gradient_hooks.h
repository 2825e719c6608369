// Takes gradients from where autograd leaves them.
#pragma once

#include <vector>

#include "gradient/gradient_sync.h"
#include "gradient/replicated_parameters.h"

namespace lockstep::gradient {

// Leaves parameters without a gradient, so that the next backward hands over a tensor of its own instead of adding. All
// calls for a replica come from its thread.
class GradientHooks {
 public:
  GradientHooks(ReplicatedParameters& parameters, GradientSync& sync) : parameters_(parameters), sync_(sync) {
    expects_backward_.resize(static_cast<std::size_t>(parameters.replicas()));
  }
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Puts hooks on the parameters where the sync wants gradients during backward. While no replica runs.
  void install();

  // The replica's next backward makes all its gradients of this step: they may be sent while it goes on. Until
  // take_all.
  void expect_one_backward(int replica);

  // Hands over what is left, in the place of what a step that broke off handed over. Throws InvalidArgument for a
  // gradient of another dtype or shape than its parameter.
  void take_all(int replica);

  // Forgets what an earlier backward left, and what was handed over.
  void drop(int replica);

 private:
  class Hook;
  void take(int replica, std::size_t slot);

  ReplicatedParameters& parameters_;
  GradientSync& sync_;
  std::vector<at::Tensor> hooked_;
  struct alignas(64) Flag {
    bool set = false;
  };
  std::vector<Flag> expects_backward_;  // [replica]
};

}  // namespace lockstep::gradient
