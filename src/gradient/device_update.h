// Updates of parameters on the GPU that holds them, by a few of LibTorch's kernels for all parameters together, or on a
// TPU. The host waits for none of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "lockstep/gradient/device_rule.h"

namespace lockstep::gradient {

// The rule and the settings of one optimizer, for one device and dtype. One thread at a time.
class DeviceUpdate {
 public:
  DeviceUpdate(const Optimizer& optimizer, const at::TensorOptions& options);

  // The numbers that change from step to step: what weight decay, if any, multiplies values by, then the rule's.
  std::vector<double> numbers(const UpdateStep& step) const;

  // Updates the values with gradients / divide_by, as reduce_and_update does. `numbers`: scalars on the device.
  void apply(const DeviceParameters& parameters, double divide_by, const std::vector<at::Tensor>& numbers) const;

 private:
  double decay() const { return optimizer_.options().weight_decay.value_or(0); }
  std::vector<at::Tensor> scaled(const std::vector<at::Tensor>& gradients, double divide_by) const;

  Optimizer optimizer_;
  std::unique_ptr<DeviceRule> rule_;
};

}  // namespace lockstep::gradient
