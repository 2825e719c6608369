// Compiled once for each kind of processor by Highway.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/transpose.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/highway.h>

#include "kernels/lanes-inl.h"
#include "kernels/matrix.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace {

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

HWY_EXPORT(transpose_tiles);

void transpose(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, float* to,
               std::int64_t to_stride) {
  HWY_DYNAMIC_DISPATCH(transpose_tiles)(from, from_stride, rows, columns, to, to_stride);
}

}  // namespace lockstep::kernels
#endif
