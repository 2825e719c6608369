#include "parallel/linear_call.h"

namespace lockstep::parallel {
namespace {

bool is_same_view(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

bool is_one(const c10::IValue& factor) { return factor.toScalar().equal(1); }

}  // namespace

std::optional<LinearCall> linear_call(const ops::OperatorCall& call, std::size_t i, const WeakParameter& parameter) {
  const auto& name = call.name();
  const auto argument = call.tensor(i), weight = parameter.lock();
  if (!argument.defined() || !weight.defined() || weight.dim() != 2) return {};
  if (name == "aten::linear" && i == 1 && is_same_view(argument, weight)) {
    return LinearCall{call.tensor(0), weight, call.tensor(2)};
  }
  if (!is_same_view(argument, weight.detach().t())) return {};
  if ((name == "aten::matmul" || name == "aten::mm") && i == 1) return LinearCall{call.tensor(0), weight, {}};
  if (name == "aten::addmm" && i == 2 && is_one(call.argument(3)) && is_one(call.argument(4))) {
    return LinearCall{call.tensor(1), weight, call.tensor(0)};
  }
  return {};
}

}  // namespace lockstep::parallel
