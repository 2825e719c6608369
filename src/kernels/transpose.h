// A matrix's rows become columns.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

// to[j * to_stride + i] = from[i * from_stride + j] for i < rows, j < columns. Any thread may call.
void transpose(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, float* to,
               std::int64_t to_stride);

}  // namespace lockstep::kernels
