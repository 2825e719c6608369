// float16 and bfloat16 as their bits, converted to and from float.
#pragma once

#include <bit>
#include <cstdint>

namespace lockstep::kernels {

struct BFloat16 {
  std::uint16_t bits;

  explicit BFloat16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const bool nan = (word & 0x7fffffff) > 0x7f800000;
    // Adds half of the last kept place, and the place itself when exactly between: round to nearest even.
    bits = nan ? 0x7fc0 : static_cast<std::uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

struct Float16 {
  std::uint16_t bits;

  // Adding a power of two whose unit in the last place is float16's lets the processor round (to nearest even).
  explicit Float16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>((word >> 16) & 0x8000);
    const std::uint32_t magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) {
      bits = sign | 0x7e00;  // NaN
    } else if (magnitude >= 0x477ff000) {
      bits = sign | 0x7c00;  // rounds to infinity: 65520 and more
    } else if (magnitude < 0x38800000) {
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;  // subnormal: unit 2^-24
      bits = sign | static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(shifted) - 0x3f000000);
    } else {
      const std::uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
      bits = sign | static_cast<std::uint16_t>((rounded - 0x38000000) >> 13);
    }
  }
  explicit operator float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
    const std::uint32_t magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude < 0x400) {
      const float value = static_cast<float>(magnitude) * 0x1p-24f;
      return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
    }
    return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000));
  }
};

}  // namespace lockstep::kernels
