// Converts between LibTorch's tensors and the bytes of a checkpoint.
#pragma once

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::data {

StoredTensor to_stored(const Tensor& tensor);

// A new CPU tensor.
Tensor from_stored(const StoredTensor& stored);

}  // namespace lockstep::data
