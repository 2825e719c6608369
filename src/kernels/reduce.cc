// Compiled once for each kind of processor by Highway, which picks the best at run time; the compiler vectorizes the
// loops.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/reduce.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/half.h"
#include "kernels/reduce.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {

// What elements of T are combined in.
template <class T>
using Wide = std::conditional_t<std::is_class_v<T>, float, T>;

template <class T, class Combine>
void fold(std::span<const void* const> inputs, T* HWY_RESTRICT output, size_t count, Combine combine, size_t divisor) {
  constexpr size_t kBlock = 512;
  Wide<T> sum[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = count - begin < kBlock ? count - begin : kBlock;
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (size_t i = 0; i < n; ++i) sum[i] = static_cast<Wide<T>>(first[i]);
    for (size_t k = 1; k < inputs.size(); ++k) {
      const T* input = static_cast<const T*>(inputs[k]) + begin;
      for (size_t i = 0; i < n; ++i) sum[i] = combine(sum[i], static_cast<Wide<T>>(input[i]));
    }
    if (divisor > 1) {
      for (size_t i = 0; i < n; ++i) sum[i] = static_cast<Wide<T>>(sum[i] / static_cast<Wide<T>>(divisor));
    }
    for (size_t i = 0; i < n; ++i) output[begin + i] = static_cast<T>(sum[i]);
  }
}

template <class T>
void reduce_typed(ReduceOp op, std::span<const void* const> inputs, void* output, size_t count) {
  using W = Wide<T>;
  T* out = static_cast<T*>(output);
  switch (op) {
    case ReduceOp::sum:
      return fold(
          inputs, out, count, [](W a, W b) { return static_cast<W>(a + b); }, 1);
    case ReduceOp::mean:
      return fold(
          inputs, out, count, [](W a, W b) { return static_cast<W>(a + b); }, inputs.size());
    case ReduceOp::min:
      return fold(
          inputs, out, count, [](W a, W b) { return b < a || b != b ? b : a; }, 1);
    case ReduceOp::max:
      return fold(
          inputs, out, count, [](W a, W b) { return a < b || b != b ? b : a; }, 1);
    case ReduceOp::product:
      return fold(
          inputs, out, count, [](W a, W b) { return static_cast<W>(a * b); }, 1);
  }
}

void reduce_any(ReduceOp op, DType dtype, std::span<const void* const> inputs, void* output, size_t count) {
  switch (dtype) {
    case DType::float32: return reduce_typed<float>(op, inputs, output, count);
    case DType::float64: return reduce_typed<double>(op, inputs, output, count);
    case DType::float16: return reduce_typed<Float16>(op, inputs, output, count);
    case DType::bfloat16: return reduce_typed<BFloat16>(op, inputs, output, count);
    case DType::int32: return reduce_typed<int32_t>(op, inputs, output, count);
    case DType::int64: return reduce_typed<int64_t>(op, inputs, output, count);
    case DType::uint8: return reduce_typed<uint8_t>(op, inputs, output, count);
  }
}

}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {

HWY_EXPORT(reduce_any);

void reduce(ReduceOp op, DType dtype, std::span<const void* const> inputs, void* output, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(reduce_any)(op, dtype, inputs, output, count);
}

}  // namespace lockstep::kernels
#endif
