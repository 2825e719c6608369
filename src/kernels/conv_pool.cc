// Compiled once for each kind of processor by Highway. Filters lie in the lanes of two vectors, the four positions of a
// pooling window are computed side by side.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/conv_pool.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/highway.h>

#include <limits>
#include <vector>

#include "kernels/conv_pool.h"
#include "kernels/transpose.h"
#include "kernels/windows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace {

constexpr int kPositions = 4;  // of a 2 x 2 window

inline std::int64_t block() { return 2 * lanes(); }
std::int64_t padded_filters(std::int64_t filters) { return (filters + block() - 1) / block() * block(); }
std::int64_t winner_count(const ConvPool& s) { return s.pixels() * padded_filters(s.filters); }

// Where each tap's input lies, from a window's corner.
std::vector<std::int64_t> tap_offsets(const ConvPool& s) {
  std::vector<std::int64_t> offsets;
  for (std::int64_t c = 0; c < s.channels; ++c) {
    for (std::int64_t i = 0; i < s.size_h; ++i) {
      for (std::int64_t j = 0; j < s.size_w; ++j) offsets.push_back((c * s.in_h + i) * s.in_w + j);
    }
  }
  return offsets;
}

// The bias is added last, as LibTorch's convolution does, so that most results are the same to the bit.
template <bool kFinite>
HWY_INLINE void finish(Vector a, Vector b, Vector c, Vector d, const float* bias, float* output, std::uint8_t* winner) {
  const auto offset = hn::LoadU(kFloats, bias);
  Largest<kFinite> best{hn::Zero(kFloats), hn::Set(kInts, kPositions)};
  best.meet(hn::Add(a, offset), 0);
  best.meet(hn::Add(b, offset), 1);
  best.meet(hn::Add(c, offset), 2);
  best.meet(hn::Add(d, offset), 3);
  hn::StoreU(best.value, kFloats, output);
  hn::StoreU(hn::DemoteTo(Bytes(), best.position), Bytes(), winner);
}

// One pooled pixel, two vectors of filters.
template <bool kFinite>
void forward_pixel(const float* corner, std::int64_t in_w, const std::int64_t* offsets, std::int64_t taps,
                   const float* weight, std::int64_t width, const float* bias, float* output, std::uint8_t* winner) {
  auto a0 = hn::Zero(kFloats), b0 = a0, c0 = a0, d0 = a0;
  auto a1 = a0, b1 = a0, c1 = a0, d1 = a0;
  for (std::int64_t t = 0; t < taps; ++t) {
    const auto w0 = hn::LoadU(kFloats, weight + t * width), w1 = hn::LoadU(kFloats, weight + t * width + lanes());
    const float* x = corner + offsets[t];
    const auto xa = hn::Set(kFloats, x[0]), xb = hn::Set(kFloats, x[1]);
    const auto xc = hn::Set(kFloats, x[in_w]), xd = hn::Set(kFloats, x[in_w + 1]);
    a0 = hn::MulAdd(w0, xa, a0);
    a1 = hn::MulAdd(w1, xa, a1);
    b0 = hn::MulAdd(w0, xb, b0);
    b1 = hn::MulAdd(w1, xb, b1);
    c0 = hn::MulAdd(w0, xc, c0);
    c1 = hn::MulAdd(w1, xc, c1);
    d0 = hn::MulAdd(w0, xd, d0);
    d1 = hn::MulAdd(w1, xd, d1);
  }
  finish<kFinite>(a0, b0, c0, d0, bias, output, winner);
  finish<kFinite>(a1, b1, c1, d1, bias + lanes(), output + lanes(), winner + lanes());
}

// The sum of absolute values. NaN and infinity show in it.
float magnitude(const float* values, std::int64_t count) {
  auto sum = hn::Zero(kFloats);
  for (std::int64_t i = 0; i < count; i += lanes()) sum = hn::Add(sum, hn::Abs(First(count - i).load(values + i)));
  return hn::GetLane(hn::SumOfLanes(kFloats, sum));
}

void forward(const ConvPool& s, std::size_t images, const float* input, const float* weight, const float* bias,
             float* output, std::uint8_t* winner) {
  const auto offsets = tap_offsets(s);
  const auto width = padded_filters(s.filters), pixels = s.pixels(), taps = s.taps();
  const auto image_size = s.channels * s.in_h * s.in_w;
  std::vector<float> packed(static_cast<std::size_t>((taps + 1) * width));  // [taps][width], then the bias
  float* const packed_bias = packed.data() + taps * width;
  transpose(weight, taps, s.filters, taps, packed.data(), width);
  std::copy_n(bias, s.filters, packed_bias);
  const float weights = magnitude(packed.data(), (taps + 1) * width);
  std::vector<float> pooled(static_cast<std::size_t>(pixels * width));
  for (std::size_t image = 0; image < images; ++image) {
    // Where no sum can overflow, none is NaN.
    const bool finite = (1 + magnitude(input, image_size)) * weights < std::numeric_limits<float>::max();
    const auto forward_one = finite ? &forward_pixel<true> : &forward_pixel<false>;
    for (std::int64_t f = 0; f < width; f += block()) {
      auto pixel = f;
      for (std::int64_t row = 0; row < s.out_h(); ++row) {
        for (std::int64_t column = 0; column < s.out_w(); ++column, pixel += width) {
          forward_one(input + 2 * row * s.in_w + 2 * column, s.in_w, offsets.data(), taps, packed.data() + f, width,
                      packed_bias + f, pooled.data() + pixel, winner + pixel);
        }
      }
    }
    transpose(pooled.data(), width, pixels, s.filters, output, pixels);
    input += image_size;
    output += s.filters * pixels;
    winner += pixels * width;
  }
}

// The four elements of a 2 x 2 window of the input, and which of them won for each filter in a vector.
#if HWY_TARGET == HWY_SCALAR
struct Window {
  const float* corner;
  std::int64_t in_w;
};
inline Window load_window(const float* corner, std::int64_t in_w) { return {corner, in_w}; }

class Won {
 public:
  explicit Won(const std::uint8_t* winner) : winner_(*winner) {}
  Vector masked(Vector gradient) const { return winner_ == kPositions ? hn::Zero(kFloats) : gradient; }
  Vector choose(Window window) const {
    return hn::Set(kFloats, window.corner[(winner_ % kPositions) / 2 * window.in_w + winner_ % 2]);
  }

 private:
  int winner_;
};
#else
using Window = Vector;  // its elements in the first four lanes

template <std::size_t kLanes, class Low>
HWY_INLINE auto widened(Low low) {
  if constexpr (kLanes == hn::MaxLanes(kFloats)) {
    return low;
  } else {
    return widened<2 * kLanes>(hn::ZeroExtendVector(hn::FixedTag<float, 2 * kLanes>(), low));
  }
}

HWY_INLINE Window load_window(const float* corner, std::int64_t in_w) {
  constexpr hn::FixedTag<float, 2> kTwo;
  constexpr hn::FixedTag<float, 4> kFour;
  return widened<4>(hn::Combine(kFour, hn::LoadU(kTwo, corner + in_w), hn::LoadU(kTwo, corner)));
}

class Won {
 public:
  explicit Won(const std::uint8_t* winner)
      : winner_(hn::PromoteTo(kInts, hn::LoadU(Bytes(), winner))),
        index_(hn::IndicesFromVec(kFloats, hn::And(winner_, hn::Set(kInts, kPositions - 1)))) {}

  Vector masked(Vector gradient) const {
    return hn::IfThenElseZero(hn::RebindMask(kFloats, hn::Lt(winner_, hn::Set(kInts, kPositions))), gradient);
  }
  Vector choose(Window window) const { return hn::TableLookupLanes(window, index_); }

 private:
  Numbers winner_;
  decltype(hn::IndicesFromVec(kFloats, Numbers())) index_;
};
#endif

// Adds what one image gives to the gradients of kTaps taps for two vectors of filters.
template <int kTaps>
void backward_taps(const ConvPool& s, const float* input, const float* gradient, const std::uint8_t* winner,
                   const std::int64_t* offsets, std::int64_t width, float* grad_weight) {
  Vector sum0[kTaps], sum1[kTaps];
  for (int t = 0; t < kTaps; ++t) {
    sum0[t] = hn::LoadU(kFloats, grad_weight + t * width);
    sum1[t] = hn::LoadU(kFloats, grad_weight + t * width + lanes());
  }
  for (std::int64_t row = 0; row < s.out_h(); ++row) {
    for (std::int64_t column = 0; column < s.out_w(); ++column, gradient += width, winner += width) {
      const Won won0(winner), won1(winner + lanes());
      const auto g0 = won0.masked(hn::LoadU(kFloats, gradient));
      const auto g1 = won1.masked(hn::LoadU(kFloats, gradient + lanes()));
      const float* corner = input + 2 * row * s.in_w + 2 * column;
      for (int t = 0; t < kTaps; ++t) {
        const auto window = load_window(corner + offsets[t], s.in_w);
        sum0[t] = hn::MulAdd(won0.choose(window), g0, sum0[t]);
        sum1[t] = hn::MulAdd(won1.choose(window), g1, sum1[t]);
      }
    }
  }
  for (int t = 0; t < kTaps; ++t) {
    hn::StoreU(sum0[t], kFloats, grad_weight + t * width);
    hn::StoreU(sum1[t], kFloats, grad_weight + t * width + lanes());
  }
}

void add_bias_gradient(const float* gradient, const std::uint8_t* winner, std::int64_t pixels, std::int64_t width,
                       float* grad_bias) {
  for (std::int64_t f = 0; f < width; f += lanes()) {
    auto sum = hn::LoadU(kFloats, grad_bias + f);
    for (std::int64_t i = f; i < pixels * width; i += width) {
      sum = hn::Add(sum, Won(winner + i).masked(hn::LoadU(kFloats, gradient + i)));
    }
    hn::StoreU(sum, kFloats, grad_bias + f);
  }
}

void backward(const ConvPool& s, std::size_t images, const float* input, const float* grad_output,
              const std::uint8_t* winner, float* grad_weight, float* grad_bias) {
  const auto offsets = tap_offsets(s);
  const auto width = padded_filters(s.filters), pixels = s.pixels(), taps = s.taps();
  std::vector<float> gradient(static_cast<std::size_t>(pixels * width));
  std::vector<float> packed(static_cast<std::size_t>((taps + 1) * width));  // as in forward
  float* const packed_bias = packed.data() + taps * width;
  for (std::size_t image = 0; image < images; ++image) {
    transpose(grad_output, pixels, s.filters, pixels, gradient.data(), width);
    for (std::int64_t f = 0; f < width; f += block()) {
      const auto add = [&](auto backward_some, std::int64_t t) {
        backward_some(s, input, gradient.data() + f, winner + f, &offsets[static_cast<std::size_t>(t)], width,
                      packed.data() + t * width + f);
      };
      std::int64_t t = 0;
      for (; t + 9 <= taps; t += 9) add(&backward_taps<9>, t);
      for (; t < taps; ++t) add(&backward_taps<1>, t);
    }
    add_bias_gradient(gradient.data(), winner, pixels, width, packed_bias);
    input += s.channels * s.in_h * s.in_w;
    grad_output += s.filters * pixels;
    winner += pixels * width;
  }
  transpose(packed.data(), width, taps, s.filters, grad_weight, taps);
  std::copy_n(packed_bias, s.filters, grad_bias);
}

constexpr ConvPoolKernels kTable = {winner_count, forward, backward};
const ConvPoolKernels* table() { return &kTable; }

}  // namespace
}  // namespace lockstep::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::kernels {

HWY_EXPORT(table);

const ConvPoolKernels& conv_pool_kernels() { return *HWY_DYNAMIC_DISPATCH(table)(); }

}  // namespace lockstep::kernels
#endif
