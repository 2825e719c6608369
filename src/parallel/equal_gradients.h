// Finds whole parameters that the ranks of tensor parallelism train on parts of the activations without summing.
#pragma once

#include <string>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::parallel {

// Collective. Throws InvalidArgument on all ranks where their gradients differ, by their norms and sums. `whose`, for
// the message: "of up.weight".
void check_equal_gradients(const Tensor& gradient, const Communicator& ranks, const std::string& whose);

// From now on backwards compare the gradients of the parameter, which all ranks have whole: the first, second, fourth,
// eighth and so on, so that it costs nothing.
void watch_gradients(const Tensor& parameter, const std::string& name, const Communicator& ranks);

}  // namespace lockstep::parallel
