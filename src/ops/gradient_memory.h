// Memory in which the gradients of parameters are wanted, such as a buffer that other processes read: an operator of
// ours that makes one writes it there at once.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::ops {

// For the backward that this thread runs next, until clear_gradient_memory: `memory`, contiguous and of the parameter's
// shape and dtype, is for the gradient of the parameter whose values lie at `values`.
void offer_gradient_memory(const void* values, at::Tensor memory);
void clear_gradient_memory();

// What was offered for the parameter at `values`, once; else new memory of these sizes.
at::Tensor take_gradient_memory(const void* values, at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace lockstep::ops
