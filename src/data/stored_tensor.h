// Between LibTorch's tensors and the bytes of a checkpoint.
#pragma once

#include "lockstep/checkpoint.h"
#include "lockstep/tensor.h"

namespace lockstep::data {

// Throws InvalidArgument for a dtype that checkpoints do not hold.
DType to_dtype(at::ScalarType type);
at::ScalarType to_scalar_type(DType dtype);

StoredTensor to_stored(const Tensor& tensor);

// A CPU tensor of its own.
Tensor from_stored(const StoredTensor& stored);

}  // namespace lockstep::data
