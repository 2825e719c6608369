// Types that vector kernels share, and loads and stores of fewer elements than a vector has. Included once for each
// kind of processor, as Highway's own *-inl.h headers are.
#if defined(LOCKSTEP_KERNELS_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_KERNELS_LANES_INL_H_
#undef LOCKSTEP_KERNELS_LANES_INL_H_
#else
#define LOCKSTEP_KERNELS_LANES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Ints = hn::RebindToSigned<Floats>;
using Bytes = hn::Rebind<std::uint8_t, Floats>;
using Vector = hn::Vec<Floats>;
using Numbers = hn::Vec<Ints>;

constexpr Floats kFloats;
constexpr Ints kInts;
inline std::int64_t lanes() { return static_cast<std::int64_t>(hn::Lanes(kFloats)); }

// The first `count` lanes, all where count is larger, none where it is negative. Memory of the others is not touched.
class First {
 public:
  explicit First(std::int64_t count)
      : count_(std::clamp<std::int64_t>(count, 0, lanes())),
        mask_(hn::FirstN(kFloats, static_cast<std::size_t>(count_))) {}

  // Zero in the other lanes.
  Vector load(const float* from) const {
    if (count_ == lanes()) return hn::LoadU(kFloats, from);
    if constexpr (kMasks) return hn::MaskedLoad(mask_, kFloats, from);
    HWY_ALIGN float copy[hn::MaxLanes(kFloats)] = {};
    for (std::int64_t i = 0; i < count_; ++i) copy[i] = from[i];
    return hn::Load(kFloats, copy);
  }

  void store(Vector values, float* to) const {
    if (count_ == lanes()) return hn::StoreU(values, kFloats, to);
    if constexpr (kMasks) return hn::BlendedStore(values, mask_, kFloats, to);
    HWY_ALIGN float copy[hn::MaxLanes(kFloats)];
    hn::Store(values, kFloats, copy);
    for (std::int64_t i = 0; i < count_; ++i) to[i] = copy[i];
  }

 private:
  // Processors below AVX2 have no masked loads; Highway's stand-in reads all lanes.
  static constexpr bool kMasks = HWY_MAX_BYTES >= 32;

  std::int64_t count_;
  hn::Mask<Floats> mask_;
};

}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
