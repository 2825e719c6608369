// The device on which all ranks' tensors go from rank to rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/collective/communicator.h"

namespace lockstep::gradient {

// Returns where such tensors, as the parameters' gradients, are best summed or sent. That is their GPU if each rank has
// one for all of them, and the Group reaches it; else it is the CPU. Collective.
at::Device device_of_sums(const Communicator& ranks, const std::vector<at::Tensor>& tensors);

}  // namespace lockstep::gradient
