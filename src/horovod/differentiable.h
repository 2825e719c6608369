// Operations with a gradient, which is what horovod.torch gives.
#pragma once

#include <functional>

#include "lockstep/horovod.h"

namespace lockstep::horovod {

// The gradients of the results -> those of the inputs. All ranks call it in their backward.
using Backward = std::function<Tensors(const Tensors&)>;

// What `operation` returns of `inputs`, in the graph of autograd where these require gradients.
Tensors differentiable(const Tensors& inputs, const std::function<Tensors()>& operation, Backward backward);

}  // namespace lockstep::horovod
