// How windows lie over a row, and loads of every second element, for the pooling kernels. Included once for each kind
// of processor, as Highway's own *-inl.h headers are.
#if defined(LOCKSTEP_KERNELS_WINDOWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_KERNELS_WINDOWS_INL_H_
#undef LOCKSTEP_KERNELS_WINDOWS_INL_H_
#else
#define LOCKSTEP_KERNELS_WINDOWS_INL_H_
#endif

#include "kernels/lanes-inl.h"
#include "kernels/pooling.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {

// The window positions that lie inside the image, in one direction: [begin, end).
struct Range {
  std::int64_t begin, end;
};
inline Range inside(std::int64_t start, std::int64_t size, std::int64_t dilation, std::int64_t limit) {
  const auto begin = start >= 0 ? 0 : (-start + dilation - 1) / dilation;
  const auto end = std::min(size, (limit - start + dilation - 1) / dilation);
  return {begin, end};
}

// The largest so far of a window's elements and its position: the last NaN, else the first of the largest. kFinite:
// there is no NaN.
template <bool kFinite>
struct Largest {
  Vector value;
  Numbers position;

  void consider(Vector next, std::int64_t number) {
    auto wins = hn::Gt(next, value);
    if constexpr (kFinite) {
      value = hn::Max(next, value);
    } else {
      wins = hn::Or(wins, hn::IsNaN(next));
      value = hn::IfThenElse(wins, next, value);
    }
    position = hn::IfThenElse(hn::RebindMask(kInts, wins), hn::Set(kInts, static_cast<std::int32_t>(number)), position);
  }
};

// Returns the outputs of a row whose windows are between the left and right edges, if vectors serve this stride.
inline Range columns_inside(const Pooling& p) {
  if (p.stride_w > 2) return {p.out_w, p.out_w};
  const auto begin = std::min(p.out_w, (p.padding_w + p.stride_w - 1) / p.stride_w);
  const auto room = p.in_w + p.padding_w - (p.size_w - 1) * p.dilation_w - 1;
  return {begin, std::max(begin, std::min(p.out_w, room < 0 ? 0 : room / p.stride_w + 1))};
}

// Elements 0, stride, 2 * stride, ... of a row, for the `count` first lanes; nothing beyond the last is read.
template <int kStride>
class StridedLoad {
 public:
  explicit StridedLoad(std::int64_t count) : low_(reach(count)), high_(reach(count) - lanes()) {}

  Vector operator()(const float* from) const {
#if HWY_TARGET == HWY_SCALAR
    return low_.load(from);
#else
    if constexpr (kStride == 1) return low_.load(from);
    return hn::ConcatEven(kFloats, high_.load(from + lanes()), low_.load(from));
#endif
  }

 private:
  static std::int64_t reach(std::int64_t count) { return kStride * (count - 1) + 1; }

  First low_, high_;
};

// Lane i takes lane first + i / 2.
template <class Tag>
auto doubling(Tag tag, std::int64_t first) {
  HWY_ALIGN std::int32_t index[hn::MaxLanes(kInts)];
  for (std::int64_t i = 0; i < lanes(); ++i) index[i] = static_cast<std::int32_t>(first + i / 2);
  return hn::SetTableIndices(tag, index);
}

}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
