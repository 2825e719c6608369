// Devices that are not here: steps are traced and compiled for them, and never run (`lockstep compile-for`).
#pragma once

#include <memory>
#include <string>

#include "ops/traced_program.h"

namespace lockstep::tpu {

// `chips`: a topology's name, such as "v5e:2x4". A step that is compiled is described in the file that the
// environment's LOCKSTEP_COMPILE_REPORT names, or on standard output: a line each. Launching it throws DeviceError.
std::shared_ptr<ops::ProgramDevices> devices_to_compile_for(const std::string& chips,
                                                            const ops::ProgramDevicesOptions& options);

}  // namespace lockstep::tpu
