#include "parallel/split_linear.h"

#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "ops/fast.h"
#include "ops/parameter_hook.h"
#include "ops/watching_hook.h"
#include "parallel/divided_parameter.h"

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

std::optional<LinearCall> linear_call(const ops::OperatorCall& call, std::size_t i,
                                      const gradient::WeakTensor& parameter) {
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

namespace {

// LibTorch uses the kind in its own tests alone.
constexpr auto kCollecting = c10::DebugInfoKind::TEST_INFO;

// Null where backward leaves nothing for later.
WeightGradients* collecting() { return static_cast<WeightGradients*>(c10::ThreadLocalDebugInfo::get(kCollecting)); }

// Hands the gradient to the leaf as backward does.
void accumulate(const Tensor& weight, const Tensor& gradient) {
  (*torch::autograd::impl::grad_accumulator(weight))({gradient.to(weight.scalar_type())});
}

// False where the caller has hooks on the gradient, which backward would call without one.
bool can_wait(const Tensor& weight) { return weight.is_leaf() && !ops::may_keep_gradient(weight); }

// Gradients are computed in the dtype of the product, which autocast chose, and have it. Their backward may be
// differentiated.
Tensor input_gradient(const Tensor& gradient, const Tensor& weight) {
  const ops::WithoutHooks reading(weight);
  // A copy has no hooks: the next backward takes this rank's part as it is.
  if (at::GradMode::is_enabled()) return at::matmul(gradient, weight.clone().to(gradient.scalar_type()));
  return ops::linear_input_gradient(gradient, weight.to(gradient.scalar_type()));
}

Tensor weight_gradient(const Tensor& gradient, const Tensor& x) {
  const auto same = x.to(gradient.scalar_type());
  if (!at::GradMode::is_enabled()) return ops::linear_weight_gradient(gradient, same);
  return at::mm(gradient.reshape({-1, gradient.size(-1)}).t(), same.reshape({-1, x.size(-1)}));
}

struct SplitLinear : torch::autograd::Function<SplitLinear> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias) {
    // x is saved only where backward reads it: else it may be changed in place.
    context->save_for_backward({weight.requires_grad() ? x : Tensor(), weight});
    context->saved_data["needs"] =
        std::vector<bool>{x.requires_grad(), weight.requires_grad(), bias.has_value() && bias->requires_grad()};
    return at::linear(x, weight, bias);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    const auto needs = context->saved_data["needs"].toBoolList();
    const auto& gradient = gradients[0];
    Tensor of_x, of_weight, of_bias;
    if (needs[0]) of_x = input_gradient(gradient, weight);
    if (needs[2]) of_bias = gradient.reshape({-1, gradient.size(-1)}).sum(0);
    auto* const later = collecting();
    if (needs[1] && later != nullptr && can_wait(weight)) {
      later->add([=] { accumulate(weight, weight_gradient(gradient, x)); });
    } else if (needs[1]) {
      of_weight = weight_gradient(gradient, x);
    }
    return {of_x, of_weight, of_bias};
  }
};

}  // namespace

void WeightGradients::compute() {
  const at::NoGradGuard no_gradient;
  for (const auto& compute_one : std::exchange(left_, {})) compute_one();
}

c10::DebugInfoGuard leave_weights_to(std::shared_ptr<WeightGradients> later) {
  return c10::DebugInfoGuard(kCollecting, std::move(later));
}

Tensor split_linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return SplitLinear::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

bool SplitWeight::run(const ops::OperatorCall& call, std::size_t i) {
  if (division_of(call.tensor(i)) != nullptr) return false;  // whose own hook does it
  const auto operands = linear_call(call, i, weight_);
  if (!operands) return false;
  call.finish(split_linear(operands->x, operands->weight, operands->bias));
  return true;
}

}  // namespace lockstep::parallel
