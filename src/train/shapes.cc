#include "train/shapes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "base/text.h"
#include "data/stage.h"
#include "lockstep/base/error.h"

namespace lockstep::train {
namespace {

void require_defined(const char* what, const Tensor& y_true) {
  if (!y_true.defined())
    throw InvalidArgument(text(what, ": the data have no y; a loss or metric compares y with the outputs"));
}

// Labels are checked on the CPU alone: on a GPU this would synchronize the device, whose kernels check by themselves.
void check_labels(const char* what, const Tensor& labels, std::int64_t classes) {
  if (!labels.device().is_cpu() || labels.numel() == 0) return;
  const std::span values(labels.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(labels.numel()));
  for (const auto value : values) {
    if (value >= 0 && value < classes) continue;
    throw InvalidArgument(
        text(what, ": a label is ", value, "; the model has ", classes, " outputs, so labels are 0 to ", classes - 1));
  }
}

void require_real(const char* what, const Tensor& y_true, const Tensor& y_pred) {
  if (!y_true.is_complex() || y_pred.is_complex()) return;
  throw InvalidArgument(text(what, ": y has dtype ", y_true.scalar_type(), ", the outputs have ", y_pred.scalar_type(),
                             "; complex numbers are not compared with real ones"));
}

// Returns the first value that is not allowed; on CPUs alone, as check_labels.
template <class Allowed>
std::optional<double> first_not(const Tensor& values, const Allowed& allowed) {
  if (!values.device().is_cpu() || values.numel() == 0) return std::nullopt;
  const auto find = [&]<class T>(const Tensor& contiguous, T) -> std::optional<double> {
    for (const auto value : std::span(contiguous.const_data_ptr<T>(), static_cast<std::size_t>(contiguous.numel()))) {
      if (!allowed(static_cast<double>(value))) return static_cast<double>(value);
    }
    return std::nullopt;
  };
  if (values.scalar_type() == at::kDouble) return find(values.contiguous(), double());
  return find(values.to(at::kFloat).contiguous(), float());
}

}  // namespace

void require_sample_weights(const Tensor& weight) {
  if (weight.is_complex()) throw InvalidArgument("sample weights are complex numbers; they must be real");
  const auto bad = first_not(weight, [](double value) { return value >= 0 && !std::isinf(value); });
  if (bad) throw InvalidArgument(text("a sample weight is ", *bad, "; it must be 0 or more, and finite"));
}

Tensor shares_like_prediction(const char* what, const Tensor& y_true, const Tensor& y_pred) {
  auto labels = like_prediction(what, y_true, y_pred);
  constexpr double kRounding = 1e-3;  // of probabilities that were computed, perhaps in 16 bits
  const auto bad = first_not(labels, [](double value) { return value >= -kRounding && value <= 1 + kRounding; });
  if (bad) throw InvalidArgument(text(what, ": a label is ", *bad, "; labels are 0 or 1, or between them"));
  return labels;
}

Tensor with_dimensions_of(const Tensor& y_pred, const Tensor& y_true) {
  if (!y_true.defined()) return y_true;
  if (y_true.dim() + 1 == y_pred.dim() && y_pred.size(-1) == 1) return y_true.unsqueeze(-1);
  if (y_true.dim() == y_pred.dim() + 1 && y_true.size(-1) == 1) return y_true.squeeze(-1);
  return y_true;
}

Tensor like_prediction(const char* what, const Tensor& y_true, const Tensor& y_pred) {
  require_defined(what, y_true);
  require_real(what, y_true, y_pred);
  const auto result = with_dimensions_of(y_pred, y_true);
  if (result.sizes() != y_pred.sizes()) {
    throw InvalidArgument(
        text(what, ": y has shape ", y_true.sizes(), ", the outputs have ", y_pred.sizes(), "; they must be alike"));
  }
  return result.to(y_pred.scalar_type());
}

Tensor class_labels(const char* what, const Tensor& y_true, const Tensor& y_pred) {
  require_defined(what, y_true);
  if (y_true.is_complex()) throw InvalidArgument(text(what, ": labels are complex numbers; classes are whole numbers"));
  Tensor labels = y_true;
  if (labels.dim() == y_pred.dim() && labels.size(-1) == 1) labels = labels.squeeze(-1);
  if (y_pred.dim() < 2 || labels.sizes() != y_pred.sizes().slice(0, static_cast<std::size_t>(y_pred.dim()) - 1)) {
    throw InvalidArgument(text(what, ": y has shape ", y_true.sizes(), ", the outputs have ", y_pred.sizes(),
                               "; y must be the outputs' shape without the last dimension"));
  }
  if (labels.is_floating_point() && labels.device().is_cpu() && !labels.eq(labels.floor()).all().item<bool>()) {
    throw InvalidArgument(text(what, ": labels are fractions; classes are whole numbers"));
  }
  labels = labels.to(at::kLong).contiguous();
  check_labels(what, labels, y_pred.size(-1));
  return labels;
}

std::optional<Tensor> widened(Tensor weight, const Tensor& values) {
  while (weight.dim() < values.dim()) weight = weight.unsqueeze(-1);
  bool fits = weight.dim() == values.dim();
  for (std::int64_t i = 0; fits && i < weight.dim(); ++i)
    fits = weight.size(i) == values.size(i) || weight.size(i) == 1;
  return fits ? std::optional(weight) : std::nullopt;
}

Tensor weight_like(const Tensor& weight, const Tensor& values) {
  require_sample_weights(weight);
  Tensor result = weight.to(values.scalar_type());
  if (result.dim() == values.dim() + 1 && result.size(-1) == 1) result = result.squeeze(-1);
  if (const auto wider = widened(result, values)) return *wider;
  throw InvalidArgument(
      text("sample weights have shape ", weight.sizes(), "; the values that they weigh have ", values.sizes()));
}

Example example_like(const Example& batch) {
  return internal::each_of(batch, [](const Tensor& tensor) {
    auto sizes = tensor.sizes().vec();
    sizes.at(0) = 2;
    return at::zeros(sizes, tensor.options());
  });
}

}  // namespace lockstep::train
