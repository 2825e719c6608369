// Tells whether this machine has a TPU. Two files do: find_tpu.cc, and without_tpu.cc in a build without PJRT.
#pragma once

#include <string>

namespace lockstep::cli {

// "8 x TPU v5 lite, by libtpu.so", or "none", and why.
std::string find_tpu();

}  // namespace lockstep::cli
