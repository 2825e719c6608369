// Decides which calls use our own kernels.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::ops {

// True where our operators may replace LibTorch's: unless LOCKSTEP_KERNELS is "libtorch", which is read once.
bool fast_operators();

// True where one operator of ours may replace several of LibTorch's: not under autocast, where each operator of
// LibTorch chooses its own precision.
bool fast_fusion();

// A tensor that kernels can read: float32 in a CPU's memory, with elements, no lazy negation, no hooks
// (parameter_hook.h), and without forward-mode derivatives.
bool fast(const at::Tensor& x);

// A gradient without a lazy negation.
inline at::Tensor resolved(const at::Tensor& gradient) { return gradient.is_neg() ? gradient.resolve_neg() : gradient; }

}  // namespace lockstep::ops
