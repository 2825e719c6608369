// Rules where their parameters lie on a GPU: a few of LibTorch's kernels for all parameters together.
#pragma once

#include "lockstep/gradient/device_rule.h"

namespace lockstep::gradient {

// What was registered for the rule's type, or ours for our own; for another, one that computes in host memory. The rule
// outlives it.
std::unique_ptr<DeviceRule> make_device_rule(const UpdateRule& rule, const at::TensorOptions& options);

}  // namespace lockstep::gradient
