// Operators whose lowering is a composition of others': LibTorch has one kernel for each, and XLA fuses what it is made
// of.
#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "tpu/call.h"

namespace lockstep::tpu {
namespace {

using Tensors = std::vector<at::Tensor>;

Lowering composed(std::function<Tensors(Call&)> make) {
  return [make = std::move(make)](Call& call) { call.returns(make(call)); };
}

at::Tensor given(Call& call, std::size_t i) { return call.has(i) ? call.tensor(i) : at::Tensor(); }

Sizes last_dimensions(std::size_t count) {
  Sizes dimensions;
  for (std::size_t i = count; i > 0; --i) dimensions.push_back(-static_cast<std::int64_t>(i));
  return dimensions;
}

Sizes first_dimensions(std::int64_t rank, std::size_t but_last) {
  Sizes dimensions(static_cast<std::size_t>(rank) - but_last);
  std::iota(dimensions.begin(), dimensions.end(), 0);
  return dimensions;
}

at::Tensor in_float(const at::Tensor& x) { return x.to(at::promote_types(x.scalar_type(), at::kFloat)); }

// Mean and 1 / standard deviation, with dimensions of size 1.
std::pair<at::Tensor, at::Tensor> moments(const at::Tensor& x, const Sizes& dimensions, double epsilon) {
  const auto mean = x.mean(dimensions, true);
  return {mean, ((x - mean).square().mean(dimensions, true) + epsilon).rsqrt()};
}

// The gradient of (x - mean) * rstd, which is `normal`, with respect to x.
at::Tensor of_normal(const at::Tensor& gradient, const at::Tensor& normal, const at::Tensor& rstd,
                     const Sizes& dimensions) {
  const auto mean = gradient.mean(dimensions, true), projection = (gradient * normal).mean(dimensions, true);
  return (gradient - mean - normal * projection) * rstd;
}

Tensors layer_norm(Call& call) {
  const auto x = in_float(call.tensor(0));
  const auto weight = given(call, 2), bias = given(call, 3);
  const auto [mean, rstd] = moments(x, last_dimensions(call.integers(1).size()), call.real(4));
  auto y = (x - mean) * rstd;
  if (weight.defined()) y = y * weight;
  if (bias.defined()) y = y + bias;
  return {y.to(call.tensor(0).scalar_type()), mean, rstd};
}

Tensors layer_norm_backward(Call& call) {
  const auto x = in_float(call.tensor(1));
  const auto gradient = in_float(call.tensor(0));
  const auto count = call.integers(2).size();
  const auto mean = call.tensor(3), rstd = call.tensor(4), weight = given(call, 5);
  const auto normal = (x - mean) * rstd;
  const auto over = first_dimensions(x.dim(), count);
  const auto summed = [&](const at::Tensor& values) { return over.empty() ? values : values.sum(over); };
  Tensors gradients(3);
  const auto wanted = call.argument(7).toBoolList();
  if (wanted.get(0)) {
    gradients[0] = of_normal(weight.defined() ? gradient * weight : gradient, normal, rstd, last_dimensions(count))
                       .to(call.tensor(1).scalar_type());
  }
  if (wanted.get(1) && weight.defined()) gradients[1] = summed(gradient * normal).to(weight.scalar_type());
  if (wanted.get(2) && weight.defined()) gradients[2] = summed(gradient).to(weight.scalar_type());
  return gradients;
}

// x as [batch, groups, channels of a group, values].
struct Groups {
  std::int64_t batch, channels, values, groups;
  at::Tensor split(const at::Tensor& x) const { return x.reshape({batch, groups, channels / groups, values}); }
  at::Tensor along_channels(const at::Tensor& w) const { return w.reshape({1, groups, channels / groups, 1}); }
};

Tensors group_norm(Call& call) {
  const Groups groups{call.integer(3), call.integer(4), call.integer(5), call.integer(6)};
  const auto x = groups.split(in_float(call.tensor(0)));
  const auto weight = given(call, 1), bias = given(call, 2);
  const auto [mean, rstd] = moments(x, {2, 3}, call.real(7));
  auto y = (x - mean) * rstd;
  if (weight.defined()) y = y * groups.along_channels(weight);
  if (bias.defined()) y = y + groups.along_channels(bias);
  return {y.reshape(call.tensor(0).sizes()).to(call.tensor(0).scalar_type()),
          mean.reshape({groups.batch, groups.groups}), rstd.reshape({groups.batch, groups.groups})};
}

Tensors group_norm_backward(Call& call) {
  const Groups groups{call.integer(5), call.integer(6), call.integer(7), call.integer(8)};
  const auto gradient = groups.split(in_float(call.tensor(0))), x = groups.split(in_float(call.tensor(1)));
  const Sizes one{groups.batch, groups.groups, 1, 1};
  const auto mean = call.tensor(2).reshape(one), rstd = call.tensor(3).reshape(one);
  const auto weight = given(call, 4);
  const auto normal = (x - mean) * rstd;
  const auto wanted = call.argument(9).toBoolList();
  Tensors gradients(3);
  if (wanted.get(0)) {
    gradients[0] = of_normal(weight.defined() ? gradient * groups.along_channels(weight) : gradient, normal, rstd, {2, 3})
                       .reshape(call.tensor(1).sizes())
                       .to(call.tensor(1).scalar_type());
  }
  if (wanted.get(1)) gradients[1] = (gradient * normal).sum(Sizes{0, 3}).reshape({groups.channels});
  if (wanted.get(2)) gradients[2] = gradient.sum(Sizes{0, 3}).reshape({groups.channels});
  return gradients;
}

// Gates of LibTorch's recurrent layers, [batch, gates * width], with their biases.
Tensors gates(Call& call, std::size_t i, std::size_t bias, std::int64_t count) {
  auto all = call.tensor(i);
  if (call.has(bias)) all = all + call.tensor(bias);
  return all.chunk(count, 1);
}

Tensors lstm_cell(Call& call) {
  const auto input = gates(call, 0, 3, 4), hidden = gates(call, 1, 4, 4);
  const auto i = at::sigmoid(input[0] + hidden[0]), f = at::sigmoid(input[1] + hidden[1]);
  const auto g = at::tanh(input[2] + hidden[2]), o = at::sigmoid(input[3] + hidden[3]);
  const auto c = f * call.tensor(2) + i * g;
  return {o * at::tanh(c), c, at::cat({i, f, g, o}, 1)};
}

Tensors lstm_cell_backward(Call& call) {
  const auto gate = call.tensor(4).chunk(4, 1);
  const auto &i = gate[0], &f = gate[1], &g = gate[2], &o = gate[3];
  const auto tanh_c = at::tanh(call.tensor(3));
  auto of_c = call.has(1) ? call.tensor(1) : at::zeros_like(tanh_c);
  const auto of_h = call.has(0) ? call.tensor(0) : at::zeros_like(tanh_c);
  of_c = of_c + of_h * o * (1 - tanh_c.square());
  const auto gradient = at::cat({of_c * g * i * (1 - i), of_c * call.tensor(2) * f * (1 - f), of_c * i * (1 - g.square()),
                                 of_h * tanh_c * o * (1 - o)},
                                1);
  return {gradient, of_c * f, call.flag(5) ? gradient.sum(Sizes{0}) : at::Tensor()};
}

Tensors gru_cell(Call& call) {
  const auto input = gates(call, 0, 3, 3), hidden = gates(call, 1, 4, 3);
  const auto h = call.tensor(2);
  const auto r = at::sigmoid(input[0] + hidden[0]), z = at::sigmoid(input[1] + hidden[1]);
  const auto n = at::tanh(input[2] + r * hidden[2]);
  return {n + z * (h - n), at::cat({r, z, n, h, hidden[2]}, 1)};
}

Tensors gru_cell_backward(Call& call) {
  const auto gradient = call.tensor(0);
  const auto saved = call.tensor(1).chunk(5, 1);
  const auto &r = saved[0], &z = saved[1], &n = saved[2], &h = saved[3], &hidden_n = saved[4];
  const auto of_n = gradient * (1 - z) * (1 - n.square());
  const auto of_z = gradient * (h - n) * z * (1 - z);
  const auto of_r = of_n * hidden_n * r * (1 - r);
  const auto of_input = at::cat({of_r, of_z, of_n}, 1), of_hidden = at::cat({of_r, of_z, of_n * r}, 1);
  const bool biased = call.flag(2);
  return {of_input, of_hidden, gradient * z, biased ? of_input.sum(Sizes{0}) : at::Tensor(),
          biased ? of_hidden.sum(Sizes{0}) : at::Tensor()};
}

// Of a row without any finite number 0, and not NaN: of attention where a query may see nothing.
Tensors safe_softmax(Call& call) {
  const auto x = call.has(2) ? call.tensor(0).to(call.dtype(2)) : call.tensor(0);
  const auto dimension = call.integer(1);
  const auto sees_nothing = x.eq(-std::numeric_limits<double>::infinity()).all(dimension, true);
  const auto result = at::_softmax(x, dimension, false);
  return {at::where(sees_nothing, at::zeros_like(result), result)};
}

Tensors variance_of(Call& call, bool with_mean) {
  const auto x = call.tensor(0);
  const auto dimensions = call.has(1) && !call.integers(1).empty() ? call.integers(1) : all_dimensions(static_cast<std::size_t>(x.dim()));
  const double correction = call.has(2) ? call.real(2) : 1;
  const bool keeps = call.flag(3);
  double count = 1;
  for (const auto i : dimensions) count *= static_cast<double>(x.size(i));
  const auto mean = x.mean(dimensions, true);
  const auto sum = (x - mean).square().sum(dimensions, keeps);
  const auto variance = sum / std::max(count - correction, 0.0);
  if (!with_mean) return {variance};
  return {variance, keeps ? mean : mean.reshape(variance.sizes())};
}

Tensors vector_norm(Call& call) {
  const auto x = call.has(4) ? call.tensor(0).to(call.dtype(4)) : call.tensor(0);
  const double order = call.real(1);
  const auto dimensions = call.has(2) && !call.integers(2).empty() ? call.integers(2) : all_dimensions(static_cast<std::size_t>(x.dim()));
  const bool keeps = call.flag(3);
  if (order == 2) return {x.square().sum(dimensions, keeps).sqrt()};
  if (order == 1) return {x.abs().sum(dimensions, keeps)};
  if (order == 0) return {x.ne(0).to(x.scalar_type()).sum(dimensions, keeps)};
  if (std::isinf(order)) return {order > 0 ? x.abs().amax(dimensions, keeps) : x.abs().amin(dimensions, keeps)};
  return {x.abs().pow(order).sum(dimensions, keeps).pow(1 / order)};
}

at::Tensor by_reduction(const at::Tensor& values, std::int64_t reduction) {
  return reduction == 1 ? values.mean() : reduction == 2 ? values.sum() : values;
}

// What the gradient of a reduced loss is for each value.
at::Tensor of_reduced(const at::Tensor& gradient, const at::Tensor& like, std::int64_t reduction) {
  return reduction == 1 ? gradient / static_cast<double>(like.numel()) : gradient;
}

Tensors huber(Call& call) {
  const auto error = (call.tensor(0) - call.tensor(1)).abs();
  const double delta = call.real(3);
  const auto values = at::where(error <= delta, 0.5 * error.square(), delta * (error - 0.5 * delta));
  return {by_reduction(values, call.integer(2))};
}

Tensors huber_backward(Call& call) {
  const auto error = call.tensor(1) - call.tensor(2);
  const double delta = call.real(4);
  return {error.clamp(-delta, delta) * of_reduced(call.tensor(0), error, call.integer(3))};
}

Tensors smooth_l1(Call& call) {
  const auto error = (call.tensor(0) - call.tensor(1)).abs();
  const double beta = call.real(3);
  if (beta == 0) return {by_reduction(error, call.integer(2))};
  const auto values = at::where(error < beta, 0.5 * error.square() / beta, error - 0.5 * beta);
  return {by_reduction(values, call.integer(2))};
}

Tensors smooth_l1_backward(Call& call) {
  const auto error = call.tensor(1) - call.tensor(2);
  const double beta = call.real(4);
  const auto slope = beta == 0 ? error.sign() : (error / beta).clamp(-1, 1);
  return {slope * of_reduced(call.tensor(0), error, call.integer(3))};
}

// max(x, 0) - x y + log(1 + exp(-|x|)), with the weight of positives.
Tensors cross_entropy_with_logits(Call& call) {
  const auto x = call.tensor(0), y = call.tensor(1);
  const auto negative = (-x).clamp_min(0) + (-x.abs()).exp().log1p();  // -log sigmoid(x)
  auto values = (1 - y) * x;
  values = values + (call.has(3) ? ((call.tensor(3) - 1) * y + 1) * negative : negative);
  if (call.has(2)) values = values * call.tensor(2);
  return {by_reduction(values, call.integer(4))};
}

// Logarithms of at least -100, as in LibTorch.
Tensors cross_entropy_of_two(Call& call) {
  const auto x = call.tensor(0), y = call.tensor(1);
  auto values = -(y * x.log().clamp_min(-100) + (1 - y) * (1 - x).log().clamp_min(-100));
  if (call.has(2)) values = values * call.tensor(2);
  return {by_reduction(values, call.integer(3))};
}

Tensors cross_entropy_of_two_backward(Call& call) {
  const auto x = call.tensor(1), y = call.tensor(2);
  auto gradient = (x - y) / (x * (1 - x)).clamp_min(1e-12) * of_reduced(call.tensor(0), x, call.integer(4));
  if (call.has(3)) gradient = gradient * call.tensor(3);
  return {gradient};
}

at::Tensor softplus_of(const at::Tensor& x) { return (x.clamp_min(0) + (-x.abs()).exp().log1p()); }

void add_activations(Lowerings& table) {
  table["aten::softplus"] = composed([](Call& call) -> Tensors {
    const auto x = call.tensor(0);
    const double beta = call.real(1), threshold = call.real(2);
    return {at::where(x * beta > threshold, x, softplus_of(x * beta) / beta)};
  });
  table["aten::softplus_backward"] = composed([](Call& call) -> Tensors {
    const auto x = call.tensor(1);
    const double beta = call.real(2), threshold = call.real(3);
    return {at::where(x * beta > threshold, call.tensor(0), call.tensor(0) * at::sigmoid(x * beta))};
  });
  table["aten::log_sigmoid_forward"] = composed([](Call& call) -> Tensors {
    const auto x = call.tensor(0);
    return {-softplus_of(-x), at::zeros_like(x)};
  });
  table["aten::log_sigmoid_backward"] =
      composed([](Call& call) -> Tensors { return {call.tensor(0) * at::sigmoid(-call.tensor(1))}; });
  table["aten::leaky_relu"] = composed([](Call& call) -> Tensors {
    return {at::where(call.tensor(0) > 0, call.tensor(0), call.tensor(0) * call.scalar(1))};
  });
  table["aten::leaky_relu_backward"] = composed([](Call& call) -> Tensors {
    return {at::where(call.tensor(1) > 0, call.tensor(0), call.tensor(0) * call.scalar(2))};
  });
  table["aten::elu"] = composed([](Call& call) -> Tensors {
    const auto x = call.tensor(0);
    const auto negative = (x * call.scalar(3)).expm1() * call.scalar(1);
    return {at::where(x > 0, x, negative) * call.scalar(2)};
  });
  table["aten::elu_backward"] = composed([](Call& call) -> Tensors {
    const auto gradient = call.tensor(0), x = call.tensor(5);  // or the result
    const double alpha = call.real(1), scale = call.real(2), input_scale = call.real(3);
    const auto negative =
        call.flag(4) ? (x + alpha * scale) * input_scale : (x * input_scale).exp() * alpha * scale * input_scale;
    return {gradient * at::where(x > 0, at::full_like(x, scale), negative)};
  });
  table["aten::hardtanh"] =
      composed([](Call& call) -> Tensors { return {call.tensor(0).clamp(call.scalar(1), call.scalar(2))}; });
  table["aten::hardtanh_backward"] = composed([](Call& call) -> Tensors {
    const auto x = call.tensor(1);
    const auto inside = (x > call.scalar(2)).logical_and(x < call.scalar(3));
    return {at::where(inside, call.tensor(0), at::zeros_like(x))};
  });
  table["aten::hardsigmoid"] =
      composed([](Call& call) -> Tensors { return {(call.tensor(0) + 3).clamp(0, 6) / 6}; });
  table["aten::hardsigmoid_backward"] = composed([](Call& call) -> Tensors {
    const auto inside = call.tensor(1).abs() < 3;
    return {at::where(inside, call.tensor(0) / 6, at::zeros_like(call.tensor(0)))};
  });
  table["aten::hardswish"] =
      composed([](Call& call) -> Tensors { return {call.tensor(0) * (call.tensor(0) + 3).clamp(0, 6) / 6}; });
  table["aten::hardswish_backward"] = composed([](Call& call) -> Tensors {
    const auto gradient = call.tensor(0), x = call.tensor(1);
    const auto inner = gradient * (x / 3 + 0.5);
    return {at::where(x < -3, at::zeros_like(x), at::where(x <= 3, inner, gradient))};
  });
  table["aten::mish"] =
      composed([](Call& call) -> Tensors { return {call.tensor(0) * at::tanh(softplus_of(call.tensor(0)))}; });
  table["aten::mish_backward"] = composed([](Call& call) -> Tensors {
    const auto x = call.tensor(1);
    const auto t = at::tanh(softplus_of(x));
    return {call.tensor(0) * (t + x * (1 - t.square()) * at::sigmoid(x))};
  });
}

// Pixels as [batch, channels, height, width] of a sum over windows; what is 0 outside.
void add_losses(Lowerings& table) {
  table["aten::huber_loss"] = composed(huber);
  table["aten::huber_loss_backward"] = composed(huber_backward);
  table["aten::smooth_l1_loss"] = composed(smooth_l1);
  table["aten::smooth_l1_loss_backward"] = composed(smooth_l1_backward);
  table["aten::binary_cross_entropy_with_logits"] = composed(cross_entropy_with_logits);
  table["aten::binary_cross_entropy"] = composed(cross_entropy_of_two);
  table["aten::binary_cross_entropy_backward"] = composed(cross_entropy_of_two_backward);
}

}  // namespace

void add_composed(Lowerings& table) {
  add_activations(table);
  add_losses(table);
  table["aten::native_layer_norm"] = composed(layer_norm);
  table["aten::native_layer_norm_backward"] = composed(layer_norm_backward);
  table["aten::native_group_norm"] = composed(group_norm);
  table["aten::native_group_norm_backward"] = composed(group_norm_backward);
  table["aten::_thnn_fused_lstm_cell"] = composed(lstm_cell);
  table["aten::_thnn_fused_lstm_cell_backward_impl"] = composed(lstm_cell_backward);
  table["aten::_thnn_fused_gru_cell"] = composed(gru_cell);
  table["aten::_thnn_fused_gru_cell_backward"] = composed(gru_cell_backward);
  table["aten::_safe_softmax"] = composed(safe_softmax);
  table["aten::var.correction"] = composed([](Call& call) { return variance_of(call, false); });
  table["aten::var_mean.correction"] = composed([](Call& call) { return variance_of(call, true); });
  table["aten::std.correction"] = composed([](Call& call) -> Tensors { return {variance_of(call, false)[0].sqrt()}; });
  table["aten::linalg_vector_norm"] = composed(vector_norm);
}

}  // namespace lockstep::tpu
