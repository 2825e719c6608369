// Compiled once for each kind of processor by Highway, which picks the best at run time; the compiler vectorizes the
// loops.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/reduce.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/combine.h"
#include "kernels/reduce.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {

template <class T, class Combine>
struct Reducer {
  std::span<const void* const> inputs;
  std::span<void* const> outputs;
  size_t count;
  Combine combine;
  size_t divisor;

  const T* in(size_t k) const { return static_cast<const T*>(inputs[k]); }
  T* out(size_t k) const { return static_cast<T*>(outputs[k]); }
  Wide<T> pair(Wide<T> a, Wide<T> b) const {
    const auto value = combine(a, b);
    return divisor > 1 ? divided(value, divisor) : value;
  }

  // Every element is read and written once. ivdep: an output is an input or apart from it.
  void two_into_one() const {
    const T *a = in(0), *b = in(1);
    T* to = out(0);
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i)
      to[i] = static_cast<T>(pair(static_cast<Wide<T>>(a[i]), static_cast<Wide<T>>(b[i])));
  }
  void two_into_two() const {
    const T *a = in(0), *b = in(1);
    T *to = out(0), *too = out(1);
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) {
      to[i] = too[i] = static_cast<T>(pair(static_cast<Wide<T>>(a[i]), static_cast<Wide<T>>(b[i])));
    }
  }

  // Through blocks that stay in the first-level cache.
  void many() const {
    constexpr size_t kBlock = 512;
    Wide<T> sum[kBlock];
    alignas(64) std::byte memory[kBlock * sizeof(T)];
    T* result = reinterpret_cast<T*>(memory);
    for (size_t begin = 0; begin < count; begin += kBlock) {
      const size_t n = count - begin < kBlock ? count - begin : kBlock;
      for (size_t i = 0; i < n; ++i) sum[i] = static_cast<Wide<T>>(in(0)[begin + i]);
      for (size_t k = 1; k < inputs.size(); ++k) {
        const T* input = in(k) + begin;
        for (size_t i = 0; i < n; ++i) sum[i] = combine(sum[i], static_cast<Wide<T>>(input[i]));
      }
      if (divisor > 1) {
        for (size_t i = 0; i < n; ++i) sum[i] = divided(sum[i], divisor);
      }
      for (size_t i = 0; i < n; ++i) result[i] = static_cast<T>(sum[i]);
      for (size_t k = 0; k < outputs.size(); ++k) std::memcpy(out(k) + begin, result, n * sizeof(T));
    }
  }

  void run() const {
    if (inputs.size() == 2 && outputs.size() == 1) return two_into_one();
    if (inputs.size() == 2 && outputs.size() == 2) return two_into_two();
    many();
  }
};

void reduce_any(ReduceOp op, DType dtype, std::span<const void* const> inputs, std::span<void* const> outputs,
                size_t count) {
  visit_dtype(dtype, [&]<class T>(T) {
    visit_combine<Wide<T>>(op, [&](auto combine) {
      Reducer<T, decltype(combine)>{inputs, outputs, count, combine, op == ReduceOp::mean ? inputs.size() : 1}.run();
    });
  });
}

}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {

HWY_EXPORT(reduce_any);

void reduce(ReduceOp op, DType dtype, std::span<const void* const> inputs, std::span<void* const> outputs,
            std::size_t count) {
  HWY_DYNAMIC_DISPATCH(reduce_any)(op, dtype, inputs, outputs, count);
}

}  // namespace lockstep::kernels
#endif
