// Waiting for a GPU.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep::parallel {

// Waits until the device has computed all work that it was given; a CPU has already.
inline void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace lockstep::parallel
