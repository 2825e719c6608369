// Tensors of LibTorch as the rest of Lockstep describes them: dtypes, and lists of which some may be undefined.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "lockstep/base/buffer.h"

namespace lockstep::ops {

// Dtypes as LibTorch and as the rest of Lockstep call them. Throws InvalidArgument for complex and quantized dtypes,
// and others that DType lacks.
DType dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(DType dtype);

std::vector<at::Tensor> defined_of(const std::vector<at::Tensor>& tensors);

// Sizes and dtype of each, by which lists are compared: equal where the tensors are alike.
std::vector<std::int64_t> shapes_of(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep::ops
