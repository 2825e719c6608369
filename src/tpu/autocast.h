// Operators in 16 bits where a precision policy asks for it.
#pragma once

namespace lockstep::tpu {

// LibTorch's lists of which operators compute in which precision (autocast), for the device of traced steps. Once.
void register_autocast();

}  // namespace lockstep::tpu
