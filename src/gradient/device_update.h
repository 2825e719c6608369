// Updates of parameters where they lie, on a GPU: a few of LibTorch's kernels for all parameters together, none of
// which the host waits for.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/optimizer.h"

namespace lockstep {

// Parameters of one dtype and device. All lists have one length, but for `states`: [state][parameter].
struct DeviceParameters {
  std::vector<at::Tensor> values, gradients;
  std::vector<std::vector<at::Tensor>> states;  // as UpdateRule::states()
};

// The rule and the settings of one optimizer, for one device and dtype. One thread at a time.
class DeviceUpdate {
 public:
  DeviceUpdate(const Optimizer& optimizer, const at::TensorOptions& options);

  // Brings what changes from step to step to the device.
  void begin(const UpdateStep& step);

  // Moves the values by their gradients / divide_by, as reduce_and_update does; rules that are no part of Lockstep are
  // computed in host memory. Reads only what `begin` has brought: between, a CUDA graph may capture it.
  void apply(const DeviceParameters& parameters, double divide_by) const;

 private:
  std::vector<at::Tensor> scaled(const std::vector<at::Tensor>& gradients, double divide_by) const;
  void apply_on_host(const DeviceParameters& parameters) const;

  const Optimizer optimizer_;
  UpdateStep step_;
  at::Tensor rate_;      // a scalar; Adam's with its correction
  at::Tensor keep_;      // a scalar: what decay leaves of a value
  at::Tensor far_step_;  // a scalar: a step so late that LibTorch corrects nothing
};

}  // namespace lockstep
