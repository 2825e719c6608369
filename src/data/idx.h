// The IDX format of MNIST (http://yann.lecun.com/exdb/mnist):
//
//   2 bytes       zero
//   1 byte        type: 0x08 uint8, 0x0b int16, 0x0c int32, 0x0d float, 0x0e double
//   1 byte        number of dimensions
//   4 bytes each  sizes, big endian
//   the rest      elements in row-major order, big endian
#pragma once

#include <string>

#include "lockstep/ops/tensor.h"

namespace lockstep::data {

// The tensor in a file of uint8 elements, gzip or not. Throws IoError when it cannot be opened, DataError naming the
// file and the offset when it is not what it claims to be.
Tensor read_idx(const std::string& path);

}  // namespace lockstep::data
