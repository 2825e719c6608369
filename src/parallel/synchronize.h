// Waiting for a GPU.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep::parallel {

// Until the device has computed what was given to it; for a CPU that is so already.
inline void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace lockstep::parallel
