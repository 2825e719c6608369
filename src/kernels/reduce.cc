// Compiled once for each kind of processor by Highway, which picks the best at run time; the compiler vectorizes the
// loops.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/reduce.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "kernels/combine.h"
#include "kernels/reduce.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

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

void copy_streamed(std::byte* to, const std::byte* from, size_t bytes) {
  const hn::ScalableTag<uint8_t> d;
  const size_t lanes = hn::Lanes(d);
  const size_t head = static_cast<size_t>(-reinterpret_cast<intptr_t>(to)) % lanes;
  if (bytes < head + lanes) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  size_t i = head;
  for (; i + lanes <= bytes; i += lanes) {
    hn::Stream(hn::LoadU(d, reinterpret_cast<const uint8_t*>(from + i)), d, reinterpret_cast<uint8_t*>(to + i));
  }
  std::memcpy(to + i, from + i, bytes - i);
}

}  // namespace
}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {

HWY_EXPORT(reduce_any);
HWY_EXPORT(accumulate_any);
HWY_EXPORT(accumulate_half);
HWY_EXPORT(widen_half);
HWY_EXPORT(narrow_to_half);
HWY_EXPORT(divide_any);
HWY_EXPORT(copy_streamed);

void reduce(ReduceOp op, DType dtype, std::span<const void* const> inputs, std::span<void* const> outputs,
            std::size_t count) {
  HWY_DYNAMIC_DISPATCH(reduce_any)(op, dtype, inputs, outputs, count);
}

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

void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes) {
  HWY_DYNAMIC_DISPATCH(copy_streamed)(to, from, bytes);
}

void finish_copies() { hwy::FlushStream(); }

}  // namespace lockstep::kernels
#endif
