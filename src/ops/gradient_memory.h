// Memory into which our operators write the gradients of parameters directly, such as a buffer that other processes
// read.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::ops {

// Offers `memory`, contiguous and of the parameter's shape and dtype, for the gradient of the parameter whose values
// lie at `values`: in this thread's next backward, until clear_gradient_memory.
void offer_gradient_memory(const void* values, at::Tensor memory);
void clear_gradient_memory();

// Returns the memory offered for the parameter at `values`, once only; else a new tensor of `sizes`.
at::Tensor take_gradient_memory(const void* values, at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace lockstep::ops
