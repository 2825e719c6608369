// Updates of parameters on the GPU that holds them. The host waits for none of them.
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

  // Copies the values that change from step to step, such as the learning rate, to the device.
  void begin(const UpdateStep& step);

  // Updates the values with gradients / divide_by, as reduce_and_update does. Reads what `begin` copied on the device
  // only, so a CUDA graph may capture it.
  void apply(const DeviceParameters& parameters, double divide_by) const;

 private:
  std::vector<at::Tensor> scaled(const std::vector<at::Tensor>& gradients, double divide_by) const;

  Optimizer optimizer_;
  std::unique_ptr<DeviceRule> rule_;
  at::Tensor keep_;  // a scalar: what weight decay multiplies values by
};

}  // namespace lockstep::gradient
