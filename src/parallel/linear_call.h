// The operators by which modules compute a linear layer.
#pragma once

#include <optional>

#include "ops/parameter_hook.h"

namespace lockstep::parallel {

// A parameter to which a hook of it refers, without keeping it.
class WeakParameter {
 public:
  explicit WeakParameter(const at::Tensor& parameter) : weak_(parameter.getIntrusivePtr()) {}
  at::Tensor lock() const { return at::Tensor(weak_.lock()); }

 private:
  c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl> weak_;
};

// x weight^T + bias; the bias may be undefined.
struct LinearCall {
  at::Tensor x, weight, bias;
};

// The call, where its argument `i` is the parameter as the weight of a linear layer: torch::linear(x, weight, bias),
// x.matmul(weight.t()), mm, and addmm(bias, x, weight.t()).
std::optional<LinearCall> linear_call(const ops::OperatorCall& call, std::size_t i, const WeakParameter& parameter);

}  // namespace lockstep::parallel
