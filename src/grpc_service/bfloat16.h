// Gradients that are sent in 16 bits.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/half.h"

namespace lockstep::grpc_service {

// Floats rounded to the nearest bfloat16, half as many bytes; and back.
inline void to_bfloat16(std::span<const std::byte> floats, std::span<std::byte> rounded) {
  const auto* const from = reinterpret_cast<const float*>(floats.data());
  auto* const to = reinterpret_cast<kernels::BFloat16*>(rounded.data());
  for (std::size_t i = 0; i < rounded.size() / sizeof(*to); ++i) to[i] = kernels::BFloat16(from[i]);
}
inline void from_bfloat16(std::span<const std::byte> rounded, std::span<std::byte> floats) {
  const auto* const from = reinterpret_cast<const kernels::BFloat16*>(rounded.data());
  auto* const to = reinterpret_cast<float*>(floats.data());
  for (std::size_t i = 0; i < rounded.size() / sizeof(*from); ++i) to[i] = static_cast<float>(from[i]);
}

}  // namespace lockstep::grpc_service
