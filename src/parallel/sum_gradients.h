// Gradients of parameters that ranks with other tokens have in common.
#pragma once

#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep::parallel {

// Adds to each gradient those of the other ranks, but for parameters of which the ranks have other parts. A parameter
// without a gradient on any rank stays so. Collective.
void sum_gradients(const std::vector<Tensor>& parameters, const Communicator& ranks);

// True where the ranks have different parts of the parameter, each with the gradient of all ranks' losses.
bool is_divided_among(const Tensor& parameter, const Communicator& ranks);

}  // namespace lockstep::parallel
