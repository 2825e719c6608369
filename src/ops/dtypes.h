// Dtypes as LibTorch and as the rest of Lockstep call them.
#pragma once

#include <c10/core/ScalarType.h>

#include "lockstep/base/buffer.h"

namespace lockstep::ops {

// Throws InvalidArgument for complex and quantized dtypes, and others that DType lacks.
DType dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(DType dtype);

}  // namespace lockstep::ops
