// LibTorch's tensor, by its narrowest header.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

using at::Tensor;

}  // namespace lockstep
