// Compiled once for each kind of processor by Highway, which picks the best at run time; the compiler vectorizes the
// loops.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/accumulate.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/highway.h>

#include <cstdint>
#include <type_traits>

#include "kernels/combine.h"
#include "kernels/half.h"
#include "kernels/reduce.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace {

template <class T, class From>
void accumulate_typed(ReduceOp op, T* HWY_RESTRICT into, const From* HWY_RESTRICT from, size_t count) {
  visit_combine<Wide<T>>(op, [&](auto combine) {
    for (size_t i = 0; i < count; ++i) {
      into[i] = static_cast<T>(combine(static_cast<Wide<T>>(into[i]), static_cast<Wide<T>>(from[i])));
    }
  });
}

void accumulate_any(ReduceOp op, DType dtype, void* into, const void* from, size_t count) {
  visit_dtype(dtype,
              [&]<class T>(T) { accumulate_typed(op, static_cast<T*>(into), static_cast<const T*>(from), count); });
}

void accumulate_half(ReduceOp op, DType dtype, float* into, const void* from, size_t count) {
  visit_half(dtype, [&]<class T>(T) { accumulate_typed(op, into, static_cast<const T*>(from), count); });
}

template <class To, class From>
void convert(To* HWY_RESTRICT to, const From* HWY_RESTRICT from, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
}

void widen_half(DType dtype, float* to, const void* from, size_t count) {
  visit_half(dtype, [&]<class T>(T) { convert(to, static_cast<const T*>(from), count); });
}

void narrow_to_half(DType dtype, void* to, const float* from, size_t count) {
  visit_half(dtype, [&]<class T>(T) { convert(static_cast<T*>(to), from, count); });
}

void divide_any(DType dtype, void* data, size_t divisor, size_t count) {
  visit_dtype(dtype, [&]<class T>(T) {
    T* values = static_cast<T*>(data);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<T>(divided(static_cast<Wide<T>>(values[i]), divisor));
  });
}

}  // namespace
}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {

HWY_EXPORT(accumulate_any);
HWY_EXPORT(accumulate_half);
HWY_EXPORT(widen_half);
HWY_EXPORT(narrow_to_half);
HWY_EXPORT(divide_any);

void accumulate(ReduceOp op, DType dtype, void* into, const void* from, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(accumulate_any)(op, dtype, into, from, count);
}

void accumulate_wide(ReduceOp op, DType dtype, float* into, const void* from, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(accumulate_half)(op, dtype, into, from, count);
}

void widen(DType dtype, float* to, const void* from, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(widen_half)(dtype, to, from, count);
}

void narrow(DType dtype, void* to, const float* from, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(narrow_to_half)(dtype, to, from, count);
}

void divide(DType dtype, void* data, std::size_t divisor, std::size_t count) {
  if (divisor > 1) HWY_DYNAMIC_DISPATCH(divide_any)(dtype, data, divisor, count);
}

}  // namespace lockstep::kernels
#endif
