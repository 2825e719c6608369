// The version of this Lockstep. Torch-free.
#pragma once

namespace lockstep {

const char* version();  // "0.1.0"

}  // namespace lockstep
