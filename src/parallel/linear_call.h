// The operators by which modules compute a linear layer.
#pragma once

#include <optional>

#include "ops/parameter_hook.h"

namespace lockstep::parallel {

// x weight^T + bias; the bias may be undefined.
struct LinearCall {
  at::Tensor x, weight, bias;
};

// The call, where its argument `i` is the weight of a linear layer: torch::linear(x, weight, bias),
// x.matmul(weight.t()), mm and addmm(bias, x, weight.t()).
std::optional<LinearCall> linear_call(const ops::OperatorCall& call, std::size_t i);

}  // namespace lockstep::parallel
