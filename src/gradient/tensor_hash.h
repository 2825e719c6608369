// A tensor's bits as one number.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "base/hash.h"

namespace lockstep::gradient {

// Hashes four words at a time in independent lanes, which a processor computes in parallel.
inline std::uint64_t hash_of(const at::Tensor& tensor) {
  const auto values = tensor.detach().cpu().contiguous();
  const auto* bytes = static_cast<const char*>(values.const_data_ptr());
  std::array<std::uint64_t, 4> lanes{1, 2, 3, 4}, words{};
  const auto take = [&](std::size_t count) {
    std::memcpy(words.data(), bytes, count);
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      lanes[i] = std::rotl(lanes[i] ^ words[i], 29) * 0x9e3779b97f4a7c15;
    }
    bytes += count;
  };
  std::size_t left = values.nbytes();
  for (; left >= sizeof words; left -= sizeof words) take(sizeof words);
  words = {};
  if (left > 0) take(left);
  return mix(values.nbytes(), lanes[0], lanes[1], lanes[2], lanes[3]);
}

}  // namespace lockstep::gradient
