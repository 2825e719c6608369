// The precision of one model's forward pass.
#pragma once

#include <ATen/autocast_mode.h>

#include <optional>
#include <vector>

#include "lockstep/ops/tensor.h"
#include "lockstep/optimizer/optimizer.h"

namespace lockstep::train {

// A value, constant for a model.
class ComputePolicy {
 public:
  static ComputePolicy current();  // the policy of set_global_policy

  // Throws InvalidArgument where the policy cannot compute on one of the devices.
  void check(const std::vector<c10::Device>& devices) const;

  // Returns outputs in float32 where the policy had them computed in 16 bits.
  Tensor outputs(const Tensor& computed) const;

  // Returns the optimizer for this policy: with a loss scale where the 16-bit dtype cannot hold small gradients.
  Optimizer wrapped(const Optimizer& optimizer) const;

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
  explicit ComputePolicy(std::optional<at::ScalarType> type) : type_(type) {}
  std::optional<at::ScalarType> type_;  // dtype of products; none: the tensors' own
};

}  // namespace lockstep::train
