// Elementwise reduction of several arrays.
#pragma once

#include <cstddef>
#include <span>

#include "lockstep/base/buffer.h"

namespace lockstep::kernels {

// every output[i] <- op over inputs[0][i], inputs[1][i], ... in that order, for i < count; mean is the sum divided by
// the number of inputs (integers round towards zero). float16 and bfloat16 are combined in float32 and rounded to
// nearest even once. An output may be an input, and else overlaps none. Pointers are aligned to their element.
void reduce(ReduceOp op, DType dtype, std::span<const void* const> inputs, std::span<void* const> outputs,
            std::size_t count);

}  // namespace lockstep::kernels
