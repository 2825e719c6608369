// Operations with a gradient, which is what horovod.torch gives.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "lockstep/horovod.h"

namespace lockstep::horovod {

// The gradients of those results that have floating dtypes, whose numbers are in `which` -> the gradients of the inputs
// with the same numbers. All ranks call it in their backward.
using Backward = std::function<Tensors(const Tensors& gradients, const std::vector<std::size_t>& which)>;

// What `operation` returns of `inputs`, one result for each, in the graph of autograd where an input requires a
// gradient.
Tensors differentiable(const Tensors& inputs, const std::function<Tensors()>& operation, const Backward& backward);

}  // namespace lockstep::horovod
