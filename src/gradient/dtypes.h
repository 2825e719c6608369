// Dtypes of gradients, as a Group and as LibTorch call them.
#pragma once

#include <c10/core/ScalarType.h>

#include "base/text.h"
#include "lockstep/buffer.h"
#include "lockstep/error.h"

namespace lockstep::gradient {

inline DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::float32;
    case at::kDouble: return DType::float64;
    case at::kHalf: return DType::float16;
    case at::kBFloat16: return DType::bfloat16;
    default: throw InvalidArgument(text("gradients are float, double, half or bfloat16; not ", type));
  }
}

inline at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::float64: return at::kDouble;
    case DType::float16: return at::kHalf;
    case DType::bfloat16: return at::kBFloat16;
    default: return at::kFloat;
  }
}

// The least number of elements from `numel` on that fills whole cache lines.
inline std::int64_t whole_lines(std::int64_t numel, at::ScalarType dtype) {
  const auto line = 64 / static_cast<std::int64_t>(at::elementSize(dtype));
  return (numel + line - 1) / line * line;
}

}  // namespace lockstep::gradient
