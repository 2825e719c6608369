// Options as the C API takes them.
#pragma once

#include "pjrt/client.h"

namespace lockstep::pjrt {

// They point to `options`.
std::vector<PJRT_NamedValue> named_values(const Options& options);

}  // namespace lockstep::pjrt
