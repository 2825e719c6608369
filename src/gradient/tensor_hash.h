// A tensor's bits as one number.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/hash.h"

namespace lockstep {

inline std::uint64_t hash_of(const at::Tensor& tensor) {
  const auto values = tensor.detach().cpu().contiguous();
  const auto* bytes = static_cast<const char*>(values.const_data_ptr());
  std::uint64_t hash = values.nbytes(), word = 0;
  for (std::size_t left = values.nbytes(); left > 0;) {
    const auto count = std::min(left, sizeof word);
    std::memcpy(&word, bytes, count);
    hash = mix(hash, word);
    bytes += count;
    left -= count;
  }
  return hash;
}

}  // namespace lockstep
