// Dense layers. torch::linear is replaced for CPU tensors in LibTorch's dispatcher: LIBXSMM's products are often faster
// than those that LibTorch calls, for the shapes of layers. Whatever they do not cover goes to LibTorch as before.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/linear_compositeimplicitautograd_dispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <atomic>

#include "kernels/matrix.h"
#include "lockstep/ops/ops.h"
#include "ops/fast.h"

namespace lockstep::ops {
namespace {

using kernels::Matrix;

// With fewer it is nearly a product of a matrix and a vector, at which LibTorch is fast.
constexpr std::int64_t kLeastRows = 4, kLeastColumns = 8;

Tensor plain_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return at::compositeimplicitautograd::linear(x, weight, bias);
}

bool covered(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (!fast(x) || !fast(weight) || (bias.defined() && !fast(bias))) return false;
  if (x.dim() < 2 || weight.dim() != 2 || x.size(-1) != weight.size(1)) return false;
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0))) return false;
  return x.numel() / x.size(-1) >= kLeastRows && weight.size(0) >= kLeastColumns && weight.size(1) >= kLeastColumns;
}

// c[m][n] = a b, with columns shared among the threads of this replica. False where there is no kernel.
bool multiply_in_parallel(std::int64_t m, std::int64_t n, std::int64_t k, Matrix a, Matrix b, Tensor& c) {
  constexpr std::int64_t kColumns = 48;  // a whole number of vectors of every processor
  auto* to = c.mutable_data_ptr<float>();
  std::atomic<bool> done = true;
  const auto parts = (n + kColumns - 1) / kColumns;
  at::parallel_for(0, parts, /*grain=*/1, [&](std::int64_t begin, std::int64_t end) {
    const auto first = begin * kColumns, last = std::min(n, end * kColumns);
    const Matrix part{b.data + first * (b.transposed ? b.stride : 1), b.stride, b.transposed};
    if (!kernels::multiply(m, last - first, k, a, part, to + first, n)) done = false;
  });
  return done;
}

// a b, each contiguous, or its transpose where `t` says so.
struct Factor {
  const Tensor& tensor;
  bool t = false;

  std::int64_t rows() const { return tensor.size(t ? 1 : 0); }
  std::int64_t columns() const { return tensor.size(t ? 0 : 1); }
  Matrix matrix() const { return {tensor.const_data_ptr<float>(), tensor.size(1), t}; }
  Tensor view() const { return t ? tensor.t() : tensor; }
};
// c = a b; c has as many elements as a has rows times b columns.
void multiply(const Factor& a, const Factor& b, Tensor& c) {
  if (!multiply_in_parallel(a.rows(), b.columns(), a.columns(), a.matrix(), b.matrix(), c)) {
    auto matrix = c.view({a.rows(), b.columns()});
    at::mm_out(matrix, a.view(), b.view());
  }
}

// `sizes`: the result's. Not a view: users may change it in place.
Tensor product(const Factor& a, const Factor& b, at::IntArrayRef sizes) {
  auto c = at::empty(sizes, a.tensor.options());
  multiply(a, b, c);
  return c;
}

// x [..., features] as contiguous [rows, features].
Tensor as_rows(const Tensor& x) { return (x.dim() == 2 ? x : x.reshape({-1, x.size(-1)})).contiguous(); }

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias, bool relu) {
    auto sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    auto output = product({as_rows(x)}, {weight.contiguous(), true}, sizes);
    const auto contiguous_bias = bias.has_value() ? bias->contiguous() : Tensor();
    kernels::dense_kernels().add_bias(output.mutable_data_ptr<float>(), output.numel() / weight.size(0), weight.size(0),
                                      bias.has_value() ? contiguous_bias.const_data_ptr<float>() : nullptr, relu);
    // Saves only what backward reads: the input of a frozen weight may be changed in place, and freed.
    context->save_for_backward(
        {weight.requires_grad() ? x : Tensor(), x.requires_grad() ? weight : Tensor(), relu ? output : Tensor()});
    context->saved_data["bias"] = bias.has_value();
    context->saved_data["weight_at"] = reinterpret_cast<std::int64_t>(weight.const_data_ptr());
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &y = saved[2];
    const bool has_bias = context->saved_data["bias"].toBool();
    auto sizes_of_x = gradients[0].sizes().vec();
    if (weight.defined()) sizes_of_x.back() = weight.size(1);
    if (at::GradMode::is_enabled()) return differentiable_backward(x, weight, y, has_bias, gradients[0], sizes_of_x);

    auto gradient = as_rows(resolved(gradients[0]));
    if (y.defined()) {
      auto masked = at::empty_like(gradient);
      kernels::dense_kernels().relu_backward(gradient.const_data_ptr<float>(), y.const_data_ptr<float>(),
                                             gradient.numel(), masked.mutable_data_ptr<float>());
      gradient = masked;
    }
    Tensor grad_x, grad_weight, grad_bias;
    if (weight.defined()) grad_x = product({gradient}, {weight.contiguous()}, sizes_of_x);
    if (x.defined()) {
      const auto* const weight_at = reinterpret_cast<const void*>(context->saved_data["weight_at"].toInt());
      grad_weight = take_gradient_memory(weight_at, {gradient.size(1), x.size(-1)}, gradient.options());
      multiply({gradient, true}, {as_rows(x)}, grad_weight);
    }
    if (has_bias) {
      grad_bias = at::empty({gradient.size(1)}, gradient.options());
      kernels::dense_kernels().sum_rows(gradient.const_data_ptr<float>(), gradient.size(0), gradient.size(1),
                                        grad_bias.mutable_data_ptr<float>());
    }
    return {grad_x, grad_weight, grad_bias, Tensor()};
  }

  static torch::autograd::variable_list differentiable_backward(const Tensor& x, const Tensor& weight, const Tensor& y,
                                                                bool has_bias, const Tensor& grad_output,
                                                                at::IntArrayRef sizes_of_x) {
    const auto gradient =
        (y.defined() ? at::where(y <= 0, 0, grad_output) : grad_output).reshape({-1, grad_output.size(-1)});
    return {weight.defined() ? at::mm(gradient, weight).view(sizes_of_x) : Tensor(),
            x.defined() ? at::mm(gradient.t(), x.reshape({-1, x.size(-1)})) : Tensor(),
            has_bias ? gradient.sum(0) : Tensor(), Tensor()};
  }
};

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const auto defined_bias = bias.has_value() && bias->defined() ? bias : std::optional<Tensor>();
  if (!fast_operators() || !covered(x, weight, defined_bias.value_or(Tensor()))) return plain_linear(x, weight, bias);
  return Linear::apply(x, weight, defined_bias, /*relu=*/false);
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { library.impl("linear", TORCH_FN(linear)); }

}  // namespace

Tensor linear_input_gradient(const Tensor& gradient, const Tensor& weight) {
  if (!fast_operators() || !fast(gradient) || !fast(weight)) return at::matmul(gradient, weight);
  auto sizes = gradient.sizes().vec();
  sizes.back() = weight.size(1);
  return product({as_rows(gradient)}, {weight.contiguous()}, sizes);
}

Tensor linear_weight_gradient(const Tensor& gradient, const Tensor& x) {
  const auto rows = as_rows(gradient), inputs = as_rows(x);
  if (!fast_operators() || !fast(rows) || !fast(inputs)) return at::mm(rows.t(), inputs);
  return product({rows, true}, {inputs}, {rows.size(1), inputs.size(1)});
}

Tensor linear_relu(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const auto optional_bias = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  if (!fast_fusion() || !covered(x, weight, bias)) return at::relu(at::linear(x, weight, optional_bias));
  return Linear::apply(x, weight, optional_bias, /*relu=*/true);
}

}  // namespace lockstep::ops
