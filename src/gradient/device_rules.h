// Update rules for parameters on a GPU, where a few of LibTorch's kernels update all parameters together, or a TPU.
#pragma once

#include "lockstep/gradient/device_rule.h"

namespace lockstep::gradient {

// The device rule that was registered for the rule's type, or the built-in one; for other types, one that computes in
// host memory. `rule` must outlive it.
std::unique_ptr<DeviceRule> make_device_rule(const UpdateRule& rule, const at::TensorOptions& options);

}  // namespace lockstep::gradient
