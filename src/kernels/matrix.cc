// Compiled once for each kind of processor by Highway. The compiler vectorizes the loops of the bias.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/matrix.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/lanes-inl.h"
#include "kernels/matrix.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace {

void add_bias(float* HWY_RESTRICT y, std::int64_t rows, std::int64_t columns, const float* HWY_RESTRICT bias,
              bool relu) {
  for (std::int64_t row = 0; row < rows; ++row, y += columns) {
    if (bias != nullptr) {
      for (std::int64_t i = 0; i < columns; ++i) y[i] += bias[i];
    }
    if (relu) {
      for (std::int64_t i = 0; i < columns; ++i) y[i] = y[i] <= 0 ? 0 : y[i];
    }
  }
}

void relu_backward(const float* HWY_RESTRICT grad_output, const float* HWY_RESTRICT y, std::int64_t count,
                   float* HWY_RESTRICT grad_input) {
  for (std::int64_t i = 0; i < count; ++i) grad_input[i] = y[i] <= 0 ? 0 : grad_output[i];
}

void sum_rows(const float* HWY_RESTRICT gradient, std::int64_t rows, std::int64_t columns,
              float* HWY_RESTRICT grad_bias) {
  for (std::int64_t i = 0; i < columns; ++i) grad_bias[i] = 0;
  for (std::int64_t row = 0; row < rows; ++row, gradient += columns) {
    for (std::int64_t i = 0; i < columns; ++i) grad_bias[i] += gradient[i];
  }
}

// NaN where one of the values is.
float largest(const float* values, std::int64_t count) {
  auto most = hn::Set(kFloats, -std::numeric_limits<float>::infinity());
  bool nan = false;
  std::int64_t i = 0;
  for (; i + lanes() <= count; i += lanes()) {
    const auto next = hn::LoadU(kFloats, values + i);
    most = hn::Max(most, next);
    nan |= !hn::AllFalse(kFloats, hn::IsNaN(next));
  }
  float result = hn::GetLane(hn::MaxOfLanes(kFloats, most));
  for (; i < count; ++i) {
    result = std::max(result, values[i]);
    nan |= std::isnan(values[i]);
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

// powers = exp(values - most); returns their sum.
float exponentials(const float* values, std::int64_t count, float most, float* powers) {
  const auto shift = hn::Set(kFloats, most);
  auto sum = hn::Zero(kFloats);
  std::int64_t i = 0;
  for (; i + lanes() <= count; i += lanes()) {
    const auto power = hn::Exp(kFloats, hn::Sub(hn::LoadU(kFloats, values + i), shift));
    hn::StoreU(power, kFloats, powers + i);
    sum = hn::Add(sum, power);
  }
  float result = hn::GetLane(hn::SumOfLanes(kFloats, sum));
  const First rest(count - i);
  if (i < count) rest.store(hn::Exp(kFloats, hn::Sub(rest.load(values + i), shift)), powers + i);
  for (; i < count; ++i) result += powers[i];
  return result;
}

void cross_entropy(const float* logits, const std::int64_t* label, std::int64_t rows, std::int64_t classes, float* loss,
                   float* probability) {
  for (std::int64_t row = 0; row < rows; ++row, logits += classes, probability += classes) {
    const float most = largest(logits, classes);
    const float sum = exponentials(logits, classes, most, probability);
    const float scale = 1 / sum;
    for (std::int64_t i = 0; i < classes; ++i) probability[i] *= scale;
    loss[row] = std::log(sum) + (most - logits[label[row]]);
  }
}

void cross_entropy_backward(const float* grad_loss, std::int64_t step, const float* probability,
                            const std::int64_t* label, std::int64_t rows, std::int64_t classes, float* grad_logits) {
  for (std::int64_t row = 0; row < rows; ++row, probability += classes, grad_logits += classes) {
    const float gradient = grad_loss[row * step];
    for (std::int64_t i = 0; i < classes; ++i) grad_logits[i] = gradient * probability[i];
    grad_logits[label[row]] -= gradient;
  }
}

constexpr DenseKernels kTable = {add_bias, relu_backward, sum_rows, cross_entropy, cross_entropy_backward};
const DenseKernels* table() { return &kTable; }

#if HWY_TARGET != HWY_SCALAR
constexpr hn::FixedTag<float, 4> kFour;

// Four elements of each of the rows 0, 4, 8, ... of a tile, side by side.
template <std::size_t kRows>
HWY_INLINE auto load_blocks(const float* from, std::int64_t stride) {
  if constexpr (kRows == 4) {
    return hn::LoadU(kFour, from);
  } else {
    return hn::Combine(hn::FixedTag<float, kRows>(), load_blocks<kRows / 2>(from + stride * (kRows / 2), stride),
                       load_blocks<kRows / 2>(from, stride));
  }
}

// kRows rows of four columns: within each block of four lanes, the four blocks that stand above each other are
// transposed.
template <std::size_t kRows>
HWY_INLINE void tile(const float* from, std::int64_t from_stride, float* to, std::int64_t to_stride) {
  constexpr hn::FixedTag<float, kRows> kTag;
  constexpr hn::RepartitionToWide<decltype(kTag)> kPairs;
  const auto a = load_blocks<kRows>(from, from_stride), b = load_blocks<kRows>(from + from_stride, from_stride);
  const auto c = load_blocks<kRows>(from + 2 * from_stride, from_stride);
  const auto d = load_blocks<kRows>(from + 3 * from_stride, from_stride);
  const auto low_ab = hn::BitCast(kPairs, hn::InterleaveLower(kTag, a, b));
  const auto low_cd = hn::BitCast(kPairs, hn::InterleaveLower(kTag, c, d));
  const auto high_ab = hn::BitCast(kPairs, hn::InterleaveUpper(kTag, a, b));
  const auto high_cd = hn::BitCast(kPairs, hn::InterleaveUpper(kTag, c, d));
  hn::StoreU(hn::BitCast(kTag, hn::InterleaveLower(kPairs, low_ab, low_cd)), kTag, to);
  hn::StoreU(hn::BitCast(kTag, hn::InterleaveUpper(kPairs, low_ab, low_cd)), kTag, to + to_stride);
  hn::StoreU(hn::BitCast(kTag, hn::InterleaveLower(kPairs, high_ab, high_cd)), kTag, to + 2 * to_stride);
  hn::StoreU(hn::BitCast(kTag, hn::InterleaveUpper(kPairs, high_ab, high_cd)), kTag, to + 3 * to_stride);
}
#endif

// The rows [begin, rows) in tiles of kRows; returns the first row that is left.
template <std::size_t kRows>
std::int64_t transpose_rows(const float* from, std::int64_t from_stride, std::int64_t begin, std::int64_t rows,
                            std::int64_t columns, float* to, std::int64_t to_stride) {
  constexpr auto kStep = static_cast<std::int64_t>(kRows);
  auto i = begin;
  for (; i + kStep <= rows; i += kStep) {
    std::int64_t j = 0;
#if HWY_TARGET != HWY_SCALAR
    if constexpr (kRows >= 4) {
      for (; j + 4 <= columns; j += 4)
        tile<kRows>(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
    }
#endif
    for (; j < columns; ++j) {
      for (auto k = i; k < i + kStep; ++k) to[j * to_stride + k] = from[k * from_stride + j];
    }
  }
  return i;
}

void transpose_tiles(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, float* to,
                     std::int64_t to_stride) {
  auto row = transpose_rows<hn::MaxLanes(kFloats)>(from, from_stride, 0, rows, columns, to, to_stride);
  row = transpose_rows<4>(from, from_stride, row, rows, columns, to, to_stride);
  transpose_rows<1>(from, from_stride, row, rows, columns, to, to_stride);
}

}  // namespace
}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {

HWY_EXPORT(table);
HWY_EXPORT(transpose_tiles);

const DenseKernels& dense_kernels() { return *HWY_DYNAMIC_DISPATCH(table)(); }

void transpose(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, float* to,
               std::int64_t to_stride) {
  HWY_DYNAMIC_DISPATCH(transpose_tiles)(from, from_stride, rows, columns, to, to_stride);
}

}  // namespace lockstep::kernels
#endif
