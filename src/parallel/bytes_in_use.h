// The bytes that this process's tensors take.
#pragma once

#include "lockstep/ops/memory.h"

namespace lockstep::parallel {

// Counted by Lockstep's allocator; 0 where LibTorch's own serves.
inline double bytes_in_use() {
  const auto stats = memory_stats();
  return static_cast<double>(stats.reserved_bytes) - static_cast<double>(stats.cached_bytes);
}

}  // namespace lockstep::parallel
