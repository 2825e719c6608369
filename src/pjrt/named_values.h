// Options as the C API takes them.
#pragma once

#include "pjrt/client.h"

namespace lockstep::pjrt {

// The values point to `options`.
std::vector<PJRT_NamedValue> named_values(const Options& options);

// Returns the options of a plugin's client: `asked`, or where those are none, the environment's PJRT_PLUGIN_OPTIONS.
// These are such as "cpu_device_count=8,name=value": whole numbers, true or false, and else text. Throws
// InvalidArgument for what is not made of names and values.
Options plugin_options(const Options& asked);

}  // namespace lockstep::pjrt
