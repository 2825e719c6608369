#include "parallel/linear_call.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::parallel {
namespace {

// True where both view the same elements, of the parameter's memory or of a copy's.
bool is_same_view(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         (a.storage_offset() == b.storage_offset() || !a.is_alias_of(b));
}

bool is_one(const c10::IValue& factor) { return factor.toScalar().equal(1); }

// The parameter itself, where gradients of the argument, which is it or its transpose, are the parameter's; else the
// argument, with whatever was done to it before.
at::Tensor weight_of(const at::Tensor& argument, const at::Tensor& parameter, bool is_transposed) {
  const auto otherwise = is_transposed ? argument.t() : argument;
  if (argument.is_same(parameter)) return parameter;
  if (!at::GradMode::is_enabled() || !is_transposed || argument.grad_fn() == nullptr) return otherwise;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  const bool leads_to_it = accumulator != nullptr && argument.grad_fn()->num_outputs() == 1 &&
                           argument.grad_fn()->next_edge(0).function == accumulator;
  return leads_to_it ? parameter : otherwise;
}

}  // namespace

std::optional<LinearCall> linear_call(const ops::OperatorCall& call, std::size_t i, const WeakParameter& parameter) {
  const auto& name = call.name();
  const auto argument = call.tensor(i), weight = parameter.lock();
  if (!argument.defined() || !weight.defined() || weight.dim() != 2) return {};
  const auto x = call.tensor(name == "aten::addmm" ? 1 : 0);
  const auto bias = name == "aten::addmm" ? call.tensor(0) : name == "aten::linear" ? call.tensor(2) : at::Tensor();
  if (bias.defined() && bias.dim() != 1) return {};
  if (name == "aten::linear") {
    if (i != 1 || !is_same_view(argument, weight)) return {};
    return LinearCall{x, weight_of(argument, weight, /*is_transposed=*/false), bias};
  }
  if (!is_same_view(argument, weight.detach().t())) return {};
  const bool is_product = (name == "aten::matmul" || name == "aten::mm") && i == 1;
  const bool is_sum = name == "aten::addmm" && i == 2 && is_one(call.argument(3)) && is_one(call.argument(4));
  if (!is_product && !is_sum) return {};
  return LinearCall{x, weight_of(argument, weight, /*is_transposed=*/true), bias};
}

}  // namespace lockstep::parallel
