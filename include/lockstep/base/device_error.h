// Thrown where a device, or the library that drives it, is absent or has failed. Has the library's own text.
#pragma once

#include "lockstep/base/error.h"

namespace lockstep {

class DeviceError : public Error {
 public:
  using Error::Error;
};

}  // namespace lockstep
