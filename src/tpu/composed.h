// Lowerings that call LibTorch's operators, each of which has its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "tpu/call.h"

namespace lockstep::tpu {

using Tensors = std::vector<at::Tensor>;

// `make` gives the operator's results, of which some may be undefined.
inline Lowering composed(std::function<Tensors(Call&)> make) {
  return [make = std::move(make)](Call& call) { call.returns(make(call)); };
}

// Argument i, or undefined.
inline at::Tensor given(Call& call, std::size_t i) { return call.has(i) ? call.tensor(i) : at::Tensor(); }

}  // namespace lockstep::tpu
