// Hands gradients over from autograd to a Reduction.
#pragma once

#include <vector>

#include "gradient/post_accumulate_hook.h"
#include "gradient/reduction.h"
#include "gradient/replicated_parameters.h"

namespace lockstep::gradient {

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
    bool expects_backward = false;
    std::vector<char> added;  // [slot]: whether the reduction has the gradient
  };
  Step& of(int replica) { return steps_[static_cast<std::size_t>(replica)]; }
  void require_as_first(int replica) const;
  void add(int replica, std::size_t slot);

  ReplicatedParameters& parameters_;
  Reduction& reduction_;
  std::vector<char> takes_;                // [slot]: whether it was trainable when this was made
  std::vector<Step> steps_;                // [replica]
  std::vector<PostAccumulateHook> hooks_;  // last: removed before what they use
};

}  // namespace lockstep::gradient
