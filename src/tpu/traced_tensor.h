// A tensor that stands for a value of the program that is traced.
#pragma once

#include <ATen/core/Tensor.h>

#include "pjrt/stablehlo.h"

namespace lockstep::tpu {

// Returns the tensor that operators' kernels get and return, without the wrapper of LibTorch's functionalization.
at::Tensor traced(pjrt::Value value);

// Returns the tensor that programs get, in that wrapper.
at::Tensor wrapped(pjrt::Value value);

// Throws InvalidArgument where `tensor` is none of the two, or of a Trace that has ended.
pjrt::Value value_of(const at::Tensor& tensor);
bool is_traced(const at::Tensor& tensor);

// From now on the tensor, which is not wrapped, stands for another value of its dtype.
void rebind(const at::Tensor& tensor, pjrt::Value value);

}  // namespace lockstep::tpu
