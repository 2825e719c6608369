// Operations with a gradient, which is what horovod.torch gives.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "lockstep/horovod.h"

namespace lockstep::horovod {

// Maps the gradients of the floating-point results, whose indices are in `which`, to the gradients of the inputs with
// the same indices. All ranks call it in their backward.
using Backward = std::function<Tensors(const Tensors& gradients, const std::vector<std::size_t>& which)>;

// Returns the results of `operation` on `inputs`, one for each, in autograd's graph where an input requires a gradient.
Tensors differentiable(const Tensors& inputs, const std::function<Tensors()>& operation, const Backward& backward);

}  // namespace lockstep::horovod
