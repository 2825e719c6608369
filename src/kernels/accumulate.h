// Reductions whose operands come one after the other, for algorithms that send partial results.
#pragma once

#include <cstddef>

#include "lockstep/base/buffer.h"

namespace lockstep::kernels {

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

}  // namespace lockstep::kernels
