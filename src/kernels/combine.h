// Operators and element types of reductions, as types that a loop can be compiled for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/half.h"
#include "lockstep/base/buffer.h"

namespace lockstep::kernels {

// The type in which elements of T are combined.
template <class T>
using Wide = std::conditional_t<std::is_class_v<T>, float, T>;

// The value in the type in which it is added and multiplied: integers wrap, and none is promoted to int, whose overflow
// is undefined.
template <class W>
auto wrapping(W value) {
  if constexpr (std::is_integral_v<W>) {
    return static_cast<std::common_type_t<std::make_unsigned_t<W>, unsigned>>(value);
  } else {
    return value;
  }
}

// Integers round towards zero.
template <class W>
W divided(W value, std::size_t divisor) {
  if constexpr (std::is_integral_v<W>) {
    return static_cast<W>(static_cast<std::int64_t>(value) / static_cast<std::int64_t>(divisor));
  } else {
    return value / static_cast<W>(divisor);
  }
}

// Calls visit with the function (W, W) -> W of the operator; mean adds. A NaN wins against every number.
template <class W, class Visit>
void visit_combine(ReduceOp op, const Visit& visit) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::mean: return visit([](W a, W b) { return static_cast<W>(wrapping(a) + wrapping(b)); });
    case ReduceOp::min: return visit([](W a, W b) { return b < a || b != b ? b : a; });
    case ReduceOp::max: return visit([](W a, W b) { return a < b || b != b ? b : a; });
    case ReduceOp::product: return visit([](W a, W b) { return static_cast<W>(wrapping(a) * wrapping(b)); });
  }
}

// Calls visit(T()) with the element type.
template <class Visit>
void visit_half(DType dtype, const Visit& visit) {
  dtype == DType::float16 ? visit(Float16(0.0f)) : visit(BFloat16(0.0f));
}

template <class Visit>
void visit_dtype(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::float32: return visit(float());
    case DType::float64: return visit(double());
    case DType::float16:
    case DType::bfloat16: return visit_half(dtype, visit);
    case DType::int32: return visit(std::int32_t());
    case DType::int64: return visit(std::int64_t());
    case DType::uint8:
    case DType::boolean: return visit(std::uint8_t());
    case DType::int8: return visit(std::int8_t());
    case DType::int16: return visit(std::int16_t());
  }
}

}  // namespace lockstep::kernels
