// Which calls our own kernels serve.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::ops {

// Whether operators of LibTorch may be replaced by ours: not where LOCKSTEP_KERNELS says "libtorch". Read once.
bool fast_operators();

// Whether an operator of ours may compute what several of LibTorch's would: under autocast each of those chooses its
// own precision.
bool fast_fusion();

// A tensor that kernels can read: float32 in a CPU's memory, with elements, no lazy negation, and without forward-mode
// derivatives.
bool fast(const at::Tensor& x);

// A gradient without a lazy negation.
inline at::Tensor resolved(const at::Tensor& gradient) { return gradient.is_neg() ? gradient.resolve_neg() : gradient; }

}  // namespace lockstep::ops
