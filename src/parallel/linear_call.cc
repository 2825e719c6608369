#include "parallel/linear_call.h"

namespace lockstep::parallel {
namespace {

// Whether it is the transpose of a matrix whose rows lie one after the other.
bool is_transposed(const at::Tensor& matrix) {
  return matrix.dim() == 2 && matrix.stride(0) == 1 && (matrix.size(1) == 1 || matrix.stride(1) == matrix.size(0));
}

bool is_one(const c10::IValue& factor) { return factor.toScalar().equal(1); }

}  // namespace

std::optional<LinearCall> linear_call(const ops::OperatorCall& call, std::size_t i) {
  const auto& name = call.name();
  if (name == "aten::linear" && i == 1) return LinearCall{call.tensor(0), call.tensor(1), call.tensor(2)};
  if ((name == "aten::matmul" || name == "aten::mm") && i == 1 && is_transposed(call.tensor(1))) {
    return LinearCall{call.tensor(0), call.tensor(1).t(), {}};
  }
  if (name == "aten::addmm" && i == 2 && is_transposed(call.tensor(2)) && is_one(call.argument(3)) &&
      is_one(call.argument(4))) {
    return LinearCall{call.tensor(1), call.tensor(2).t(), call.tensor(0)};
  }
  return {};
}

}  // namespace lockstep::parallel
