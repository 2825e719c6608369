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

#include "kernels/combine.h"
#include "kernels/reduce.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {

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

void reduce_any(ReduceOp op, DType dtype, std::span<const void* const> inputs, void* output, size_t count) {
  visit_dtype(dtype, [&]<class T>(T) {
    visit_combine<Wide<T>>(op, [&](auto combine) {
      fold(inputs, static_cast<T*>(output), count, combine, op == ReduceOp::mean ? inputs.size() : 1);
    });
  });
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
