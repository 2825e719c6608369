// Conversions of half precision against the definition of the formats, for every bit pattern.
#include "kernels/half.h"

#include <gtest/gtest.h>

#include <cmath>

namespace lockstep::kernels {
namespace {

// The value of a binary format with the given widths.
double value_of(unsigned bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const unsigned fraction = bits & ((1U << fraction_bits) - 1);
  const int exponent = static_cast<int>(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const double sign = (bits >> (exponent_bits + fraction_bits)) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1U << fraction_bits), exponent - bias - fraction_bits);
}

template <class Half>
void check_all(int exponent_bits, int fraction_bits) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    Half half(0.0F);
    half.bits = static_cast<std::uint16_t>(bits);
    const double expected = value_of(bits, exponent_bits, fraction_bits);
    const auto actual = static_cast<float>(half);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(actual)) << bits;
      ASSERT_TRUE(std::isnan(static_cast<float>(Half(actual)))) << bits;
      continue;
    }
    ASSERT_EQ(actual, static_cast<float>(expected)) << bits;
    ASSERT_EQ(Half(actual).bits, bits);  // there and back
    if (std::isinf(expected) || (bits & 0x7fff) == 0) continue;
    const double next = value_of(bits + 1, exponent_bits, fraction_bits);
    if (std::isinf(next)) continue;
    const auto between = static_cast<float>((expected + next) / 2);  // exact in float: goes to the even one
    ASSERT_EQ(Half(between).bits, bits % 2 == 0 ? bits : bits + 1) << bits;
  }
}

TEST(Half, Float16EveryPattern) { check_all<Float16>(5, 10); }
TEST(Half, BFloat16EveryPattern) { check_all<BFloat16>(8, 7); }

}  // namespace
}  // namespace lockstep::kernels
