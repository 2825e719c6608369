#include "train/added_losses.h"

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>

#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/ops/ops.h"
#include "lockstep/train/loss.h"
#include "train/shapes.h"

namespace lockstep {

namespace {

constexpr double kEpsilon = 1e-7;  // keras.config.epsilon()

// Keeps values [batch]; else returns the mean over the last dimension.
Tensor mean_of_last(const Tensor& values) { return values.dim() > 1 ? values.mean(-1) : values; }

void check(const char* what, const CrossentropyOptions& options, bool smoothing_allowed) {
  const bool in_range = options.label_smoothing >= 0 && options.label_smoothing <= 1;
  require(in_range && (smoothing_allowed || options.label_smoothing == 0), text(what, ": label_smoothing"),
          options.label_smoothing, smoothing_allowed ? "from 0 to 1" : "0 for sparse labels");
}

Loss::Function sparse_categorical(CrossentropyOptions options) {
  check("SparseCategoricalCrossentropy", options, false);
  return [options](const Tensor& y_true, const Tensor& y_pred) {
    const auto labels = train::class_labels("SparseCategoricalCrossentropy", y_true, y_pred);
    if (options.from_logits) return ops::softmax_cross_entropy(y_pred, labels);
    return ops::softmax_cross_entropy(y_pred.clamp(kEpsilon, 1 - kEpsilon).log(), labels);
  };
}

Loss::Function categorical(CrossentropyOptions options) {
  check("CategoricalCrossentropy", options, true);
  return [options](const Tensor& y_true, const Tensor& y_pred) {
    auto target = train::shares_like_prediction("CategoricalCrossentropy", y_true, y_pred);
    if (options.label_smoothing > 0) {
      target = target * (1 - options.label_smoothing) + options.label_smoothing / static_cast<double>(y_pred.size(-1));
    }
    if (options.from_logits) return -(target * at::log_softmax(y_pred, -1)).sum(-1);
    const auto probability = (y_pred / y_pred.sum(-1, true)).clamp(kEpsilon, 1 - kEpsilon);
    return -(target * probability.log()).sum(-1);
  };
}

Loss::Function binary(CrossentropyOptions options) {
  check("BinaryCrossentropy", options, true);
  return [options](const Tensor& y_true, const Tensor& y_pred) {
    auto target = train::shares_like_prediction("BinaryCrossentropy", y_true, y_pred);
    if (options.label_smoothing > 0) target = target * (1 - options.label_smoothing) + 0.5 * options.label_smoothing;
    if (options.from_logits) {
      return mean_of_last(at::binary_cross_entropy_with_logits(y_pred, target, {}, {}, at::Reduction::None));
    }
    const auto probability = y_pred.clamp(kEpsilon, 1 - kEpsilon);
    return mean_of_last(-(target * probability.log() + (1 - target) * (1 - probability).log()));
  };
}

Loss::Function squared_error() {
  return [](const Tensor& y_true, const Tensor& y_pred) {
    return mean_of_last((y_pred - train::like_prediction("MeanSquaredError", y_true, y_pred)).square());
  };
}

Loss::Function absolute_error() {
  return [](const Tensor& y_true, const Tensor& y_pred) {
    return mean_of_last((y_pred - train::like_prediction("MeanAbsoluteError", y_true, y_pred)).abs());
  };
}

Loss::Function huber(double delta) {
  require(delta > 0, "Huber: delta", delta, "above 0");
  return [delta](const Tensor& y_true, const Tensor& y_pred) {
    const auto target = train::like_prediction("Huber", y_true, y_pred);
    return mean_of_last(at::huber_loss(y_pred, target, at::Reduction::None, delta));
  };
}

Loss loss_by_name(const std::string& name) {
  if (name == "mse" || name == "mean_squared_error") return MeanSquaredError();
  if (name == "mae" || name == "mean_absolute_error") return MeanAbsoluteError();
  if (name == "huber") return Huber();
  if (name == "binary_crossentropy") return BinaryCrossentropy();
  if (name == "categorical_crossentropy") return CategoricalCrossentropy();
  if (name == "sparse_categorical_crossentropy") return SparseCategoricalCrossentropy();
  throw InvalidArgument(text("no loss is called \"", name,
                             "\"; there are mse, mae, huber, binary_crossentropy, "
                             "categorical_crossentropy, sparse_categorical_crossentropy"));
}

}  // namespace

Loss::Loss(std::string name, Function function, Reduction reduction)
    : name_(std::move(name)), function_(std::move(function)), reduction_(reduction) {
  if (!function_) throw InvalidArgument(text("loss ", name_, ": the function is empty"));
}

Loss::Loss(const char* name) : Loss(loss_by_name(name)) {}
Loss::Loss(const std::string& name) : Loss(loss_by_name(name)) {}

Tensor Loss::values(const Tensor& y_true, const Tensor& y_pred) const {
  auto values = function_(train::with_dimensions_of(y_pred, y_true), y_pred);
  if (values.dim() > 0 && values.size(0) != y_pred.size(0)) {
    throw InvalidArgument(text("loss ", name_, ": its values have shape ", values.sizes(), " for a batch of ",
                               y_pred.size(0), "; it must give one for each example"));
  }
  return values;
}

Loss::Terms Loss::terms(const Tensor& y_true, const Tensor& y_pred, const Tensor& sample_weight) const {
  auto values = this->values(y_true, y_pred);
  if (values.dim() == 0) {
    if (sample_weight.defined()) {
      throw InvalidArgument(
          text("loss ", name_,
               ": it gives one number for the batch, which sample weights cannot weigh; give one for each example"));
    }
    values = values.expand({y_pred.size(0)});
  }
  Tensor weight;
  if (sample_weight.defined()) {
    weight = train::weight_like(sample_weight, values);
    values = values * weight;
  }
  auto divisor = static_cast<double>(values.numel());
  if (reduction_ == Reduction::sum) divisor = 1;
  if (reduction_ == Reduction::mean_with_sample_weight && weight.defined()) {
    divisor = weight.sum().item<double>();
  }
  return {values.sum(), divisor};
}

Loss::MaskedTerms Loss::masked_terms(const Tensor& y_true, const Tensor& y_pred, const Tensor& sample_weight,
                                     const Tensor& counts) const {
  auto values = this->values(y_true, y_pred);
  if (values.dim() == 0) {
    throw InvalidArgument(text("loss ", name_,
                               ": it gives one number for the batch; in a compiled step, whose batches are filled up "
                               "with examples that do not count, it must give one for each example"));
  }
  const auto mask = train::weight_like(counts, values);
  const double values_of_an_example = static_cast<double>(values.numel()) / static_cast<double>(values.size(0));
  auto divisor = counts.sum() * values_of_an_example;
  values = at::where(mask > 0, values, at::zeros_like(values));
  if (sample_weight.defined()) {
    const auto weight = train::weight_like(sample_weight, values);
    values = values * weight;
    if (reduction_ == Reduction::mean_with_sample_weight) divisor = (weight * mask).sum();
  }
  if (reduction_ == Reduction::sum) divisor = at::ones_like(divisor);
  return {values.sum(), divisor};
}

Tensor Loss::operator()(const Tensor& y_true, const Tensor& y_pred, const Tensor& sample_weight) const {
  const auto result = terms(y_true, y_pred, sample_weight);
  return result.divisor == 0 ? result.sum * 0 : result.sum / result.divisor;
}

SparseCategoricalCrossentropy::SparseCategoricalCrossentropy(CrossentropyOptions options)
    : Loss("sparse_categorical_crossentropy", sparse_categorical(options), options.reduction) {}
CategoricalCrossentropy::CategoricalCrossentropy(CrossentropyOptions options)
    : Loss("categorical_crossentropy", categorical(options), options.reduction) {}
BinaryCrossentropy::BinaryCrossentropy(CrossentropyOptions options)
    : Loss("binary_crossentropy", binary(options), options.reduction) {}
MeanSquaredError::MeanSquaredError(RegressionOptions options)
    : Loss("mean_squared_error", squared_error(), options.reduction) {}
MeanAbsoluteError::MeanAbsoluteError(RegressionOptions options)
    : Loss("mean_absolute_error", absolute_error(), options.reduction) {}
Huber::Huber(HuberOptions options) : Loss("huber", huber(options.delta), options.reduction) {}

namespace {

thread_local train::AddedLosses* losses_of_thread = nullptr;

}  // namespace

void add_loss(const Tensor& scalar) {
  if (!scalar.defined() || scalar.numel() != 1) {
    throw InvalidArgument(text("add_loss: the loss ",
                               scalar.defined() ? text("has shape ", scalar.sizes()) : "is undefined",
                               "; it must be a scalar"));
  }
  if (losses_of_thread != nullptr) losses_of_thread->add(scalar);
}

train::AddedLosses::AddedLosses(Use use) : use_(use), before_(std::exchange(losses_of_thread, this)) {}
train::AddedLosses::~AddedLosses() { losses_of_thread = before_; }

void train::AddedLosses::add(const Tensor& scalar) {
  if (use_ == Use::refused)
    throw InvalidArgument("add_loss: a model that is cut into stages has no loss but that of its last stage");
  if (use_ == Use::with_gradients && !at::GradMode::is_enabled())
    throw InvalidArgument("add_loss: in a layer that is recomputed it would have no gradient");
  const auto one = scalar.reshape({});
  sum_ = sum_.defined() ? sum_ + one : one;
}

void train::AddedLosses::check_mean(const Loss& compiled) {
  if (compiled.reduction() == Reduction::sum)
    throw InvalidArgument("add_loss: the model is compiled with a loss of Reduction::sum; take a mean");
}

}  // namespace lockstep
