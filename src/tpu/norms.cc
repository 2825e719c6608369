#include "tpu/composed.h"

#include <ATen/ATen.h>

#include <numeric>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::tpu {

namespace {

// How many values of a channel count, a scalar.
at::Tensor values_that_count(const at::Tensor& x, const at::Tensor& counts) {
  const double values_of_a_row = static_cast<double>(x.numel()) / static_cast<double>(x.size(0) * x.size(1));
  return counts.defined() ? (counts.sum() * values_of_a_row).to(x.scalar_type())
                          : at::full({}, values_of_a_row * static_cast<double>(x.size(0)), x.options());
}

// The mean of each channel's values that count.
at::Tensor mean_of_batch(const at::Tensor& x, const at::Tensor& counts) {
  const auto dimensions = all_but_channels(x.dim());
  if (!counts.defined()) return x.mean(dimensions);
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
  sizes[0] = x.size(0);
  const auto mask = counts.to(x.scalar_type()).reshape(sizes);
  const auto some = values_that_count(x, counts).clamp_min(1);  // where nothing counts, nothing is used either
  return (x * mask).sum(dimensions) / some;
}

// As in LibTorch, the variance that is kept divides by the count less one.
void update(const at::Tensor& running, const at::Tensor& value, double momentum, const at::Tensor& counts) {
  const at::NoGradGuard no_grad;
  const auto next = running * (1 - momentum) + value.detach().to(running.scalar_type()) * momentum;
  running.copy_(counts.defined() ? at::where(counts.sum() > 0, next, running) : next);
}

}  // namespace

std::vector<std::int64_t> all_but_channels(std::int64_t rank) {
  std::vector<std::int64_t> dimensions{0};
  for (std::int64_t i = 2; i < rank; ++i) dimensions.push_back(i);
  return dimensions;
}

at::Tensor along_channels(const at::Tensor& values, const at::Tensor& x) {
  if (values.numel() != x.size(1)) {
    throw InvalidArgument(text("a batch norm's weight, bias or statistics have ", values.numel(), " elements; x has ",
                               x.size(1), " channels"));
  }
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
  sizes[1] = values.size(0);
  return values.reshape(sizes);
}

at::Tensor batch_norm(const ops::OperatorCall& call, const at::Tensor& counts) {
  const auto input = call.tensor(0);
  const auto weight = call.tensor(1), bias = call.tensor(2), running_mean = call.tensor(3),
             running_var = call.tensor(4);
  const bool training = call.argument(5).toBool();
  const double momentum = call.argument(6).toDouble(), epsilon = call.argument(7).toDouble();
  const auto x = input.to(at::promote_types(input.scalar_type(), at::kFloat));
  auto mean = running_mean, variance = running_var;
  if (training || !mean.defined()) {
    mean = mean_of_batch(x, counts);
    variance = mean_of_batch((x - along_channels(mean, x)).square(), counts);
    if (training && running_mean.defined()) {
      const auto count = values_that_count(x, counts);
      const auto unbiased = variance * (count / (count - 1).clamp_min(1));
      update(running_mean, mean, momentum, counts);
      update(running_var, unbiased, momentum, counts);
    }
  }
  auto y = (x - along_channels(mean, x)) * along_channels((variance + epsilon).rsqrt(), x);
  if (weight.defined()) y = y * along_channels(weight, x);
  if (bias.defined()) y = y + along_channels(bias, x);
  return y.to(input.scalar_type());
}

// Normalization of layers, groups and batches.

namespace {

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
  if (wanted.get(2) && call.has(6)) gradients[2] = summed(gradient).to(call.tensor(6).scalar_type());
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
    gradients[0] =
        of_normal(weight.defined() ? gradient * groups.along_channels(weight) : gradient, normal, rstd, {2, 3})
            .reshape(call.tensor(1).sizes())
            .to(call.tensor(1).scalar_type());
  }
  if (wanted.get(1)) gradients[1] = (gradient * normal).sum(Sizes{0, 3}).reshape({groups.channels});
  if (wanted.get(2)) gradients[2] = gradient.sum(Sizes{0, 3}).reshape({groups.channels});
  return gradients;
}

// Other operators are made of this one, such as instance_norm. Calls of modules are replaced before (composed.h).
Tensors native_batch_norm(Call& call) {
  if (call.has(3) && call.flag(5))
    call.refuse("another operator calls it, and its running statistics would not be updated; call batch_norm itself");
  const auto x = in_float(call.tensor(0));
  const auto dimensions = all_but_channels(x.dim());
  const auto [mean, rstd] =
      call.flag(5) || !call.has(3)
          ? moments(x, dimensions, call.real(7))
          : std::pair(along_channels(call.tensor(3), x), along_channels((call.tensor(4) + call.real(7)).rsqrt(), x));
  auto y = (x - mean) * rstd;
  if (call.has(1)) y = y * along_channels(call.tensor(1), x);
  if (call.has(2)) y = y + along_channels(call.tensor(2), x);
  return {y.to(call.tensor(0).scalar_type()), mean.flatten(), rstd.flatten()};
}

Tensors native_batch_norm_backward(Call& call) {
  const auto gradient = in_float(call.tensor(0)), x = in_float(call.tensor(1));
  const auto weight = given(call, 2);
  const bool training = call.flag(7);
  const auto dimensions = all_but_channels(x.dim());
  const auto mean = along_channels(training ? call.tensor(5) : call.tensor(3), x);
  const auto rstd = along_channels(training ? call.tensor(6) : (call.tensor(4) + call.real(8)).rsqrt(), x);
  const auto normal = (x - mean) * rstd;
  const auto scaled = weight.defined() ? gradient * along_channels(weight, x) : gradient;
  const auto wanted = call.argument(9).toBoolList();
  Tensors gradients(3);
  if (wanted.get(0))
    gradients[0] =
        (training ? of_normal(scaled, normal, rstd, dimensions) : scaled * rstd).to(call.tensor(1).scalar_type());
  if (wanted.get(1)) gradients[1] = (gradient * normal).sum(dimensions);
  if (wanted.get(2)) gradients[2] = gradient.sum(dimensions);
  return gradients;
}

}  // namespace

void add_norms(Lowerings& table) {
  table["aten::native_batch_norm"] = composed(native_batch_norm);
  table["aten::native_batch_norm_backward"] = composed(native_batch_norm_backward);
  table["aten::native_layer_norm"] = composed(layer_norm);
  table["aten::native_layer_norm_backward"] = composed(layer_norm_backward);
  table["aten::native_group_norm"] = composed(group_norm);
  table["aten::native_group_norm_backward"] = composed(group_norm_backward);
}

}  // namespace lockstep::tpu
