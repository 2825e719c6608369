// For tests on simulated GPUs: how often the host has read what is on them.
#pragma once

#include <cstdint>

namespace lockstep {

// The number of this process's copies to the host and of its calls of Tensor::item on a GPU so far. Any thread.
std::int64_t host_reads();

}  // namespace lockstep
