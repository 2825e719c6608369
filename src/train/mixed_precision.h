// The precision of one model's forward pass.
#pragma once

#include <ATen/autocast_mode.h>

#include "lockstep/tensor.h"

namespace lockstep {

// A value, constant for a model.
class ComputePolicy {
 public:
  static ComputePolicy current();  // of set_global_policy

  // Outputs in float32 where the policy had them computed in bfloat16.
  Tensor outputs(const Tensor& computed) const;

  // While it lives, LibTorch's operators in this thread compute as the policy says on `device`.
  class Scope {
   public:
    Scope(const ComputePolicy& policy, c10::DeviceType device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const bool active_;
    const c10::DeviceType device_;
    bool enabled_before_ = false, cache_before_ = false;
    at::ScalarType dtype_before_ = at::kFloat;
  };

 private:
  explicit ComputePolicy(bool bfloat16) : bfloat16_(bfloat16) {}
  bool bfloat16_;
};

}  // namespace lockstep
