// Which Lockstep this is. Torch-free.
#pragma once

namespace lockstep {

const char* version();  // "0.1.0"

}  // namespace lockstep
