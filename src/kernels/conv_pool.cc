// Compiled once for each kind of processor by Highway. Filters lie in the lanes of two vectors, the four positions of a
// pooling window are computed side by side.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/conv_pool.cc"
#include <hwy/foreach_target.h>
// Highway's own include comes after foreach_target.
#include <hwy/highway.h>

#include <limits>
#include <vector>

#include "kernels/matrix.h"
#include "kernels/pooling.h"
#include "kernels/windows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::kernels::HWY_NAMESPACE {
namespace {

constexpr int kPositions = 4;  // of a 2 x 2 window, row by row

inline std::int64_t block() { return 2 * lanes(); }
std::int64_t padded_filters(std::int64_t filters) { return (filters + block() - 1) / block() * block(); }

// The outcome of a window for each filter in a vector, as four masks. The second position beat the first; the fourth
// the third; the lower row's best the upper row's; and the window's best was above zero.
enum Decision { kSecond, kFourth, kLower, kAlive, kDecisions };
inline std::int64_t mask_bytes() { return (lanes() + 7) / 8; }
inline std::int64_t window_bytes() { return 2 * kDecisions * mask_bytes(); }  // of two vectors of filters
constexpr std::int64_t kMaskSlack = 8;  // Highway may touch as many bytes from the last mask's first

// Bytes of the winners of an image, [blocks of two vectors of filters][windows].
std::int64_t winner_count(const ConvPool& s) {
  return padded_filters(s.filters) / block() * s.pixels() * window_bytes() + kMaskSlack;
}

// Returns where each tap's input lies, from a window's corner.
std::vector<std::int64_t> tap_offsets(const ConvPool& s) {
  std::vector<std::int64_t> offsets;
  for (std::int64_t c = 0; c < s.channels; ++c) {
    for (std::int64_t i = 0; i < s.size_h; ++i) {
      for (std::int64_t j = 0; j < s.size_w; ++j) offsets.push_back((c * s.in_h + i) * s.in_w + j);
    }
  }
  return offsets;
}

// The better of two positions: the second where it is larger or NaN, else the first.
template <bool kFinite>
struct Duel {
  Duel(Vector first, Vector second) : second_wins(hn::Gt(second, first)) {
    if constexpr (kFinite) {
      best = hn::Max(second, first);
    } else {
      second_wins = hn::Or(second_wins, hn::IsNaN(second));
      best = hn::IfThenElse(second_wins, second, first);
    }
  }
  hn::Mask<Floats> second_wins;
  Vector best;
};

// The sums of a window's positions, for two vectors of filters.
using Sums = Vector[kPositions][2];

// The bias is added last, as in LibTorch's convolution, so that most results are equal to the bit.
template <bool kFinite>
HWY_INLINE void decide(const Sums& sums, int half, const float* bias, float* output, std::uint8_t* winner) {
  const auto offset = hn::LoadU(kFloats, bias);
  const auto biased = [&](int position) { return hn::Add(sums[position][half], offset); };
  const Duel<kFinite> upper(biased(0), biased(1)), lower(biased(2), biased(3)), rows(upper.best, lower.best);
  const auto alive = Duel<kFinite>(hn::Zero(kFloats), rows.best).second_wins;
  hn::StoreU(hn::IfThenElseZero(alive, rows.best), kFloats, output);
  const auto store = [&](Decision decision, hn::Mask<Floats> mask) {
    hn::StoreMaskBits(kFloats, mask, winner + decision * mask_bytes());
  };
  store(kSecond, upper.second_wins);
  store(kFourth, lower.second_wins);
  store(kLower, rows.second_wins);
  store(kAlive, alive);
}

// Adds what kSize x kSize taps of every channel give. Each input is read once for all positions that it is part of.
template <int kSize>
HWY_INLINE void add_square(const ConvPool& s, const float* corner, const float* weight, std::int64_t width,
                           Sums& sums) {
  for (std::int64_t c = 0; c < s.channels; ++c, corner += s.in_h * s.in_w, weight += kSize * kSize * width) {
    HWY_UNROLL(8) for (int i = 0; i <= kSize; ++i) {
      HWY_UNROLL(8) for (int j = 0; j <= kSize; ++j) {
        const auto x = hn::Set(kFloats, corner[i * s.in_w + j]);
        HWY_UNROLL(4) for (int position = 0; position < kPositions; ++position) {
          const int row = i - position / 2, column = j - position % 2;
          if (row < 0 || row >= kSize || column < 0 || column >= kSize) continue;
          const float* tap = weight + (row * kSize + column) * width;
          auto& sum = sums[position];
          sum[0] = hn::MulAdd(hn::LoadU(kFloats, tap), x, sum[0]);
          sum[1] = hn::MulAdd(hn::LoadU(kFloats, tap + lanes()), x, sum[1]);
        }
      }
    }
  }
}

// add_taps for taps of any number, whose inputs lie at `offsets` from the window's corner.
HWY_INLINE void add_taps(const ConvPool& s, const std::int64_t* offsets, const float* corner, const float* weight,
                         std::int64_t width, Sums& sums) {
  for (std::int64_t t = 0; t < s.taps(); ++t, weight += width) {
    const auto w0 = hn::LoadU(kFloats, weight), w1 = hn::LoadU(kFloats, weight + lanes());
    HWY_UNROLL(4) for (int position = 0; position < kPositions; ++position) {
      const auto x = hn::Set(kFloats, corner[offsets[t] + position / 2 * s.in_w + position % 2]);
      auto& sum = sums[position];
      sum[0] = hn::MulAdd(w0, x, sum[0]);
      sum[1] = hn::MulAdd(w1, x, sum[1]);
    }
  }
}

// forward_block reads this besides the image: weights are [taps][width], then comes the bias.
struct Filters {
  const std::int64_t* offsets;
  const float* weight;
  const float* bias;
  std::int64_t width;
};

// All windows of one image for two vectors of filters. kSize: the taps are kSize x kSize; 0: any. What it reads comes
// by value: writing bytes through `winner` might change anything else, so the compiler would read it again.
template <bool kFinite, int kSize>
void forward_block(ConvPool s, Filters filters, const float* input, float* output, std::uint8_t* winner) {
  for (std::int64_t row = 0; row < s.out_h(); ++row) {
    for (std::int64_t column = 0; column < s.out_w(); ++column) {
      const float* corner = input + 2 * row * s.in_w + 2 * column;
      Sums sums;
      HWY_UNROLL(4) for (auto& sum : sums) sum[0] = sum[1] = hn::Zero(kFloats);
      if constexpr (kSize > 0) {
        add_square<kSize>(s, corner, filters.weight, filters.width, sums);
      } else {
        add_taps(s, filters.offsets, corner, filters.weight, filters.width, sums);
      }
      decide<kFinite>(sums, 0, filters.bias, output, winner);
      decide<kFinite>(sums, 1, filters.bias + lanes(), output + lanes(), winner + window_bytes() / 2);
      output += filters.width;
      winner += window_bytes();
    }
  }
}

template <bool kFinite>
auto forward_for(const ConvPool& s) {
  if (s.size_h == 3 && s.size_w == 3) return &forward_block<kFinite, 3>;
  if (s.size_h == 5 && s.size_w == 5) return &forward_block<kFinite, 5>;
  return &forward_block<kFinite, 0>;
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
    const auto forward_some = finite ? forward_for<true>(s) : forward_for<false>(s);
    auto* won = winner;
    for (std::int64_t f = 0; f < width; f += block(), won += pixels * window_bytes()) {
      forward_some(s, {offsets.data(), packed.data() + f, packed_bias + f, width}, input, pooled.data() + f, won);
    }
    transpose(pooled.data(), width, pixels, s.filters, output, pixels);
    input += image_size;
    output += s.filters * pixels;
    winner += winner_count(s);
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
  explicit Won(const std::uint8_t* winner)
      : winner_(winner[kLower] != 0 ? 2 + winner[kFourth] : winner[kSecond]), alive_(winner[kAlive] != 0) {}
  Vector masked(Vector gradient) const { return alive_ ? gradient : hn::Zero(kFloats); }
  Vector choose(Window window) const {
    return hn::Set(kFloats, window.corner[winner_ / 2 * window.in_w + winner_ % 2]);
  }

 private:
  int winner_;
  bool alive_;
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
  explicit Won(const std::uint8_t* winner) : alive_(hn::LoadMaskBits(kFloats, winner + kAlive * mask_bytes())) {
    const auto mask = [&](Decision decision) { return hn::LoadMaskBits(kInts, winner + decision * mask_bytes()); };
    const auto upper = hn::IfThenElseZero(mask(kSecond), hn::Set(kInts, 1));
    const auto lower = hn::IfThenElse(mask(kFourth), hn::Set(kInts, 3), hn::Set(kInts, 2));
    index_ = hn::IndicesFromVec(kFloats, hn::IfThenElse(mask(kLower), lower, upper));
  }
  Vector masked(Vector gradient) const { return hn::IfThenElseZero(alive_, gradient); }
  Vector choose(Window window) const { return hn::TableLookupLanes(window, index_); }

 private:
  hn::Mask<Floats> alive_;
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
    for (std::int64_t column = 0; column < s.out_w(); ++column, gradient += width, winner += window_bytes()) {
      const Won won0(winner), won1(winner + window_bytes() / 2);
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

// Adds an image's part of the bias's gradient, for two vectors of filters.
void backward_bias(const ConvPool& s, const float* gradient, const std::uint8_t* winner, std::int64_t width,
                   float* grad_bias) {
  auto sum0 = hn::LoadU(kFloats, grad_bias), sum1 = hn::LoadU(kFloats, grad_bias + lanes());
  for (std::int64_t pixel = 0; pixel < s.pixels(); ++pixel, gradient += width, winner += window_bytes()) {
    sum0 = hn::Add(sum0, Won(winner).masked(hn::LoadU(kFloats, gradient)));
    sum1 = hn::Add(sum1, Won(winner + window_bytes() / 2).masked(hn::LoadU(kFloats, gradient + lanes())));
  }
  hn::StoreU(sum0, kFloats, grad_bias);
  hn::StoreU(sum1, kFloats, grad_bias + lanes());
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
    auto* won = winner;
    for (std::int64_t f = 0; f < width; f += block(), won += pixels * window_bytes()) {
      const auto add = [&](auto backward_some, std::int64_t t) {
        backward_some(s, input, gradient.data() + f, won, &offsets[static_cast<std::size_t>(t)], width,
                      packed.data() + t * width + f);
      };
      std::int64_t t = 0;
      for (; t + 9 <= taps; t += 9) add(&backward_taps<9>, t);
      for (; t < taps; ++t) add(&backward_taps<1>, t);
      backward_bias(s, gradient.data() + f, won, width, packed_bias + f);
    }
    input += s.channels * s.in_h * s.in_w;
    grad_output += s.filters * pixels;
    winner += winner_count(s);
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
