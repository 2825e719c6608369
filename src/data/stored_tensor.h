// Between LibTorch's tensors and the bytes of a checkpoint.
#pragma once

#include "lockstep/checkpoint.h"
#include "lockstep/tensor.h"

namespace lockstep {

// Throws InvalidArgument for a dtype that checkpoints do not hold.
DType to_dtype(at::ScalarType type);
at::ScalarType to_scalar_type(DType dtype);

// Of a contiguous CPU tensor, which keeps the memory.
Buffer buffer_of_tensor(const Tensor& tensor);

StoredTensor to_stored(const Tensor& tensor);

// A CPU tensor of its own.
Tensor from_stored(const StoredTensor& stored);

// The dtype in which a checkpoint holds a tensor of `type`: bool as uint8, int8 and int16 as int32, others as they are.
at::ScalarType stored_type(at::ScalarType type);

}  // namespace lockstep
