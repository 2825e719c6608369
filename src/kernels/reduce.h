// Reductions of arrays: of several at once, and of operands that come one after the other.
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

// Reductions whose operands come one after the other, for algorithms that send partial results.

// into[i] <- op(into[i], from[i]); mean adds. Integers wrap. The arrays do not overlap.
void accumulate(ReduceOp op, DType dtype, void* into, const void* from, std::size_t count);

// True where elements are summed in float32 and rounded once.
inline bool is_half(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

// accumulate for elements that is_half names, gathered in float32.
void accumulate_wide(ReduceOp op, DType dtype, float* into, const void* from, std::size_t count);

// Between float32 and float16 or bfloat16, rounded to nearest even.
void widen(DType dtype, float* to, const void* from, std::size_t count);
void narrow(DType dtype, void* to, const float* from, std::size_t count);

// data[i] <- data[i] / divisor; integers round towards zero.
void divide(DType dtype, void* data, std::size_t divisor, std::size_t count);

// Copies of arrays that are too large to be worth a place in the caches. Copies as memcpy, but past the caches. Other
// threads see the copy after finish_copies and a release.
void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes);
void finish_copies();

}  // namespace lockstep::kernels
