#include "tpu/batch_norm.h"

#include <ATen/ATen.h>

#include <vector>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::tpu {
namespace {

struct Statistics {
  at::Tensor mean, variance;  // [channels]; the variance divides by the count
  at::Tensor count;           // scalar: values of a channel that count
};

Statistics of_batch(const at::Tensor& x, const at::Tensor& counts) {
  const auto dimensions = all_but_channels(x.dim());
  const double values_of_a_row = static_cast<double>(x.numel()) / static_cast<double>(x.size(0) * x.size(1));
  if (!counts.defined()) {
    const auto mean = x.mean(dimensions);
    const auto variance = (x - along_channels(mean, x)).square().mean(dimensions);
    return {mean, variance, at::full({}, values_of_a_row * static_cast<double>(x.size(0)), x.options())};
  }
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
  sizes[0] = x.size(0);
  const auto mask = counts.to(x.scalar_type()).reshape(sizes);
  const auto count = (counts.sum() * values_of_a_row).to(x.scalar_type());
  const auto some = count.clamp_min(1);  // where nothing counts, nothing is used either
  const auto mean = (x * mask).sum(dimensions) / some;
  const auto variance = ((x - along_channels(mean, x)).square() * mask).sum(dimensions) / some;
  return {mean, variance, count};
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
    const auto batch = of_batch(x, counts);
    mean = batch.mean;
    variance = batch.variance;
    if (training && running_mean.defined()) {
      const auto unbiased = variance * (batch.count / (batch.count - 1).clamp_min(1));
      update(running_mean, mean, momentum, counts);
      update(running_var, unbiased, momentum, counts);
    }
  }
  auto y = (x - along_channels(mean, x)) * along_channels((variance + epsilon).rsqrt(), x);
  if (weight.defined()) y = y * along_channels(weight, x);
  if (bias.defined()) y = y + along_channels(bias, x);
  return y.to(input.scalar_type());
}

}  // namespace lockstep::tpu
