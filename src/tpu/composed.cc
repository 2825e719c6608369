#include "tpu/composed.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <cmath>
#include <limits>

#include "base/text.h"

namespace lockstep::tpu {

// Operators whose lowering is a composition of others': LibTorch has one kernel for each, and XLA fuses what it is made
// of.

namespace {

// Repeats x along each dimension, one after the other.
at::Tensor repeat(Call& call) {
  const auto times = call.integers(1);
  auto x = call.tensor(0);
  while (x.dim() < static_cast<std::int64_t>(times.size())) x = x.unsqueeze(0);
  Sizes apart, spread, together;
  for (std::int64_t i = 0; i < x.dim(); ++i) {
    const auto count = times[static_cast<std::size_t>(i)];
    apart.insert(apart.end(), {1, x.size(i)});
    spread.insert(spread.end(), {count, x.size(i)});
    together.push_back(count * x.size(i));
  }
  return x.reshape(apart).expand(spread).reshape(together);
}

// Where the elements of windows along a dimension are in it: [windows * size].
at::Tensor places_in_windows(std::int64_t length, std::int64_t size, std::int64_t step, const at::Tensor& like) {
  const auto numbers = like.options().dtype(at::kLong);
  const auto begins = at::arange((length - size) / step + 1, numbers) * step;
  return (begins.unsqueeze(1) + at::arange(size, numbers)).reshape({-1});
}

// Windows take the place of the dimension; their elements are a new last dimension.
at::Tensor unfold(Call& call) {
  const auto x = call.tensor(0);
  const auto i = call.dimension(call.integer(1), static_cast<std::size_t>(x.dim()));
  const auto size = call.integer(2);
  const auto picked = x.index_select(i, places_in_windows(x.size(i), size, call.integer(3), x));
  auto sizes = picked.sizes().vec();
  sizes[static_cast<std::size_t>(i)] /= size;
  sizes.insert(sizes.begin() + i + 1, size);
  auto order = all_dimensions(sizes.size());
  order.erase(order.begin() + i + 1);
  order.push_back(i + 1);
  return picked.reshape(sizes).permute(order);
}

at::Tensor unfold_backward(Call& call) {
  const auto gradient = call.tensor(0);
  const auto sizes = call.integers(1);
  const auto i = call.dimension(call.integer(2), sizes.size());
  auto order = all_dimensions(sizes.size());
  order.insert(order.begin() + i + 1, static_cast<std::int64_t>(sizes.size()));
  auto flat = sizes;
  flat[static_cast<std::size_t>(i)] = -1;
  const auto places = places_in_windows(sizes[static_cast<std::size_t>(i)], call.integer(3), call.integer(4), gradient);
  return at::zeros(sizes, gradient.options()).index_add(i, places, gradient.permute(order).reshape(flat));
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
  const auto gradient = at::cat({of_c * g * i * (1 - i), of_c * call.tensor(2) * f * (1 - f),
                                 of_c * i * (1 - g.square()), of_h * tanh_c * o * (1 - o)},
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

// A row of -inf alone becomes 0, and not NaN: attention of a query that may see nothing.
at::Tensor safe_softmax(Call& call) {
  const auto x = call.has(2) ? call.tensor(0).to(call.dtype(2)) : call.tensor(0);
  const auto dimension = call.integer(1);
  const auto sees_nothing = x.eq(-std::numeric_limits<double>::infinity()).all(dimension, true);
  const auto result = at::_softmax(x, dimension, false);
  return at::where(sees_nothing, at::zeros_like(result), result);
}

Tensors variance_of(Call& call, bool with_mean) {
  const auto x = call.tensor(0);
  const auto dimensions = dimensions_in(call, 1, static_cast<std::size_t>(x.dim()));
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

at::Tensor vector_norm(Call& call) {
  const auto x = call.has(4) ? call.tensor(0).to(call.dtype(4)) : call.tensor(0);
  const double order = call.real(1);
  const auto dimensions = dimensions_in(call, 2, static_cast<std::size_t>(x.dim()));
  const bool keeps = call.flag(3);
  if (order == 2) return x.square().sum(dimensions, keeps).sqrt();
  if (order == 1) return x.abs().sum(dimensions, keeps);
  if (order == 0) return x.ne(0).to(x.scalar_type()).sum(dimensions, keeps);
  if (std::isinf(order)) return order > 0 ? x.abs().amax(dimensions, keeps) : x.abs().amin(dimensions, keeps);
  return x.abs().pow(order).sum(dimensions, keeps).pow(1 / order);
}

at::Tensor by_reduction(const at::Tensor& values, std::int64_t reduction) {
  return reduction == 1 ? values.mean() : reduction == 2 ? values.sum() : values;
}

// The gradient of each value, from that of a reduced loss.
at::Tensor of_reduced(const at::Tensor& gradient, const at::Tensor& like, std::int64_t reduction) {
  return reduction == 1 ? gradient / static_cast<double>(like.numel()) : gradient;
}

at::Tensor huber(Call& call) {
  const auto error = (call.tensor(0) - call.tensor(1)).abs();
  const double delta = call.real(3);
  const auto values = at::where(error <= delta, 0.5 * error.square(), delta * (error - 0.5 * delta));
  return by_reduction(values, call.integer(2));
}

at::Tensor huber_backward(Call& call) {
  const auto error = call.tensor(1) - call.tensor(2);
  const double delta = call.real(4);
  return error.clamp(-delta, delta) * of_reduced(call.tensor(0), error, call.integer(3));
}

at::Tensor smooth_l1(Call& call) {
  const auto error = (call.tensor(0) - call.tensor(1)).abs();
  const double beta = call.real(3);
  if (beta == 0) return by_reduction(error, call.integer(2));
  const auto values = at::where(error < beta, 0.5 * error.square() / beta, error - 0.5 * beta);
  return by_reduction(values, call.integer(2));
}

at::Tensor smooth_l1_backward(Call& call) {
  const auto error = call.tensor(1) - call.tensor(2);
  const double beta = call.real(4);
  const auto slope = beta == 0 ? error.sign() : (error / beta).clamp(-1, 1);
  return slope * of_reduced(call.tensor(0), error, call.integer(3));
}

// max(x, 0) - x y + log(1 + exp(-|x|)), with the weight of positives. x may be spread to the sizes of y.
at::Tensor cross_entropy_with_logits(Call& call) {
  const auto x = call.tensor(0), y = call.tensor(1);
  call.require(at::IntArrayRef(at::infer_size(x.sizes(), y.sizes())) == y.sizes(),
               text("the input's sizes are ", x.sizes(), ", the target's ", y.sizes()));
  const auto negative = (-x).clamp_min(0) + (-x.abs()).exp().log1p();  // -log sigmoid(x)
  auto values = (1 - y) * x;
  values = values + (call.has(3) ? ((call.tensor(3) - 1) * y + 1) * negative : negative);
  if (call.has(2)) values = values * call.tensor(2);
  return by_reduction(values, call.integer(4));
}

// Logarithms of at least -100, as in LibTorch.
at::Tensor cross_entropy_of_two(Call& call) {
  const auto x = call.tensor(0), y = call.tensor(1);
  call.require(x.sizes() == y.sizes(),
               text("the input's sizes are ", x.sizes(), ", the target's ", y.sizes(), "; they must be equal"));
  auto values = -(y * x.log().clamp_min(-100) + (1 - y) * (1 - x).log().clamp_min(-100));
  if (call.has(2)) values = values * call.tensor(2);
  return by_reduction(values, call.integer(3));
}

at::Tensor cross_entropy_of_two_backward(Call& call) {
  const auto x = call.tensor(1), y = call.tensor(2);
  auto gradient = (x - y) / (x * (1 - x)).clamp_min(1e-12) * of_reduced(call.tensor(0), x, call.integer(4));
  if (call.has(3)) gradient = gradient * call.tensor(3);
  return gradient;
}

at::Tensor softplus_of(const at::Tensor& x) { return (x.clamp_min(0) + (-x.abs()).exp().log1p()); }

void add_activations(Lowerings& table) {
  table["aten::softplus"] = composed([](Call& call) {
    const auto x = call.tensor(0);
    const double beta = call.real(1), threshold = call.real(2);
    return at::where(x * beta > threshold, x, softplus_of(x * beta) / beta);
  });
  table["aten::softplus_backward"] = composed([](Call& call) {
    const auto x = call.tensor(1);
    const double beta = call.real(2), threshold = call.real(3);
    return at::where(x * beta > threshold, call.tensor(0), call.tensor(0) * at::sigmoid(x * beta));
  });
  table["aten::log_sigmoid_forward"] = composed([](Call& call) {
    const auto x = call.tensor(0);
    return Tensors{-softplus_of(-x), at::zeros_like(x)};
  });
  table["aten::log_sigmoid_backward"] =
      composed([](Call& call) { return call.tensor(0) * at::sigmoid(-call.tensor(1)); });
  table["aten::leaky_relu"] = composed(
      [](Call& call) { return at::where(call.tensor(0) > 0, call.tensor(0), call.tensor(0) * call.scalar(1)); });
  table["aten::leaky_relu_backward"] = composed(
      [](Call& call) { return at::where(call.tensor(1) > 0, call.tensor(0), call.tensor(0) * call.scalar(2)); });
  table["aten::elu"] = composed([](Call& call) {
    const auto x = call.tensor(0);
    const auto negative = (x * call.scalar(3)).expm1() * call.scalar(1);
    return at::where(x > 0, x, negative) * call.scalar(2);
  });
  table["aten::elu_backward"] = composed([](Call& call) {
    const auto gradient = call.tensor(0), x = call.tensor(5);  // or the result
    const double alpha = call.real(1), scale = call.real(2), input_scale = call.real(3);
    const auto negative =
        call.flag(4) ? (x + alpha * scale) * input_scale : (x * input_scale).exp() * alpha * scale * input_scale;
    return gradient * at::where(x > 0, at::full_like(x, scale), negative);
  });
  table["aten::hardtanh"] = composed([](Call& call) { return call.tensor(0).clamp(call.scalar(1), call.scalar(2)); });
  table["aten::hardtanh_backward"] = composed([](Call& call) {
    const auto x = call.tensor(1);
    const auto inside = (x > call.scalar(2)).logical_and(x < call.scalar(3));
    return at::where(inside, call.tensor(0), at::zeros_like(x));
  });
  table["aten::hardsigmoid"] = composed([](Call& call) { return (call.tensor(0) + 3).clamp(0, 6) / 6; });
  table["aten::hardsigmoid_backward"] = composed([](Call& call) {
    const auto inside = call.tensor(1).abs() < 3;
    return at::where(inside, call.tensor(0) / 6, at::zeros_like(call.tensor(0)));
  });
  table["aten::hardswish"] = composed([](Call& call) { return call.tensor(0) * (call.tensor(0) + 3).clamp(0, 6) / 6; });
  table["aten::hardswish_backward"] = composed([](Call& call) {
    const auto gradient = call.tensor(0), x = call.tensor(1);
    const auto inner = gradient * (x / 3 + 0.5);
    return at::where(x < -3, at::zeros_like(x), at::where(x <= 3, inner, gradient));
  });
  table["aten::mish"] = composed([](Call& call) { return call.tensor(0) * at::tanh(softplus_of(call.tensor(0))); });
  table["aten::mish_backward"] = composed([](Call& call) {
    const auto x = call.tensor(1);
    const auto t = at::tanh(softplus_of(x));
    return call.tensor(0) * (t + x * (1 - t.square()) * at::sigmoid(x));
  });
}

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
  table["aten::repeat"] = composed(repeat);
  for (const char* const name : {"aten::unfold", "aten::unfold_copy"}) table[name] = composed(unfold);
  table["aten::unfold_backward"] = composed(unfold_backward);
  table["aten::_thnn_fused_lstm_cell"] = composed(lstm_cell);
  table["aten::_thnn_fused_lstm_cell_backward_impl"] = composed(lstm_cell_backward);
  table["aten::_thnn_fused_gru_cell"] = composed(gru_cell);
  table["aten::_thnn_fused_gru_cell_backward"] = composed(gru_cell_backward);
  table["aten::_safe_softmax"] = composed(safe_softmax);
  table["aten::var.correction"] = composed([](Call& call) { return variance_of(call, false); });
  table["aten::var_mean.correction"] = composed([](Call& call) { return variance_of(call, true); });
  table["aten::std.correction"] = composed([](Call& call) { return variance_of(call, false)[0].sqrt(); });
  table["aten::linalg_vector_norm"] = composed(vector_norm);
}

// Operators that no program of fixed shapes can have.
void add_refused(Lowerings& table) {
  for (const char* const name : {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}) {
    table[name] = [](Call& call) {
      call.refuse(
          "it reads a value of the step, as item() and conditions on tensors do, and values are computed only when the "
          "compiled step runs; compute with tensors (torch::where in place of a condition), and return them from the "
          "step");
    };
  }
  for (const char* const name :
       {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"}) {
    table[name] = [](Call& call) {
      call.refuse(
          "the shape of its result depends on values; a compiled step has fixed shapes: use torch::where, or masks");
    };
  }
}

}  // namespace lockstep::tpu
