// Updates of parameters where they lie, on a GPU, none of which the host waits for.
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

  // Brings what changes from step to step to the device.
  void begin(const UpdateStep& step);

  // Moves the values by their gradients / divide_by, as reduce_and_update does. Reads only what `begin` has brought:
  // between, a CUDA graph may capture it.
  void apply(const DeviceParameters& parameters, double divide_by) const;

 private:
  std::vector<at::Tensor> scaled(const std::vector<at::Tensor>& gradients, double divide_by) const;

  Optimizer optimizer_;
  std::unique_ptr<DeviceRule> rule_;
  at::Tensor keep_;  // a scalar: what decay leaves of a value
};

}  // namespace lockstep::gradient
