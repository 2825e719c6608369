#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <functional>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/train/metric.h"
#include "train/shapes.h"

namespace lockstep {
namespace {

// Adds a batch's terms to the two sums of `state`.
using AddTerms = std::function<void(std::span<double> state, const Tensor& y_true, const Tensor& y_pred,
                                    const Tensor& sample_weight)>;

// A sum divided by another one; 0 before the first term.
class Ratio final : public MetricFunction {
 public:
  Ratio(std::string name, Mode better, AddTerms add) : name_(std::move(name)), better_(better), add_(std::move(add)) {}
  std::string name() const override { return name_; }
  Mode better() const override { return better_; }
  std::size_t state_size() const override { return 2; }
  void update(std::span<double> state, const Tensor& y_true, const Tensor& y_pred,
              const Tensor& sample_weight) const override {
    const at::NoGradGuard no_grad;
    add_(state, y_true, y_pred, sample_weight);
  }
  double result(std::span<const double> state) const override { return state[1] == 0 ? 0 : state[0] / state[1]; }

 private:
  std::string name_;
  Mode better_;
  AddTerms add_;
};

// Values of a batch, [batch, ...], whose weighted mean is the metric.
using Values = std::function<Tensor(const Tensor& y_true, const Tensor& y_pred)>;

Metric mean_of(std::string name, Mode better, Values values_of) {
  const auto add = [values_of = std::move(values_of)](std::span<double> state, const Tensor& y_true,
                                                      const Tensor& y_pred, const Tensor& sample_weight) {
    auto values = values_of(y_true, y_pred);
    if (!sample_weight.defined()) {
      state[0] += values.sum(at::kDouble).item<double>();
      state[1] += static_cast<double>(values.numel());
      return;
    }
    values = values.to(at::kDouble);
    if (values.dim() > sample_weight.dim())
      values = values.flatten(std::max<std::int64_t>(sample_weight.dim(), 1)).mean(-1);
    const auto weight = train::weight_like(sample_weight, values).expand(values.sizes());
    state[0] += (values * weight).sum().item<double>();
    state[1] += weight.sum().item<double>();
  };
  return Metric(std::make_shared<Ratio>(std::move(name), better, add));
}

// The share of matches gets better as it rises, and the mean of errors as it falls.
Metric share_of(std::string name, Values matches) { return mean_of(std::move(name), Mode::max, std::move(matches)); }
Metric error_of(std::string name, Values errors) { return mean_of(std::move(name), Mode::min, std::move(errors)); }

Tensor binary_matches(const Tensor& labels, const Tensor& y_pred, double threshold) {
  return labels.eq(y_pred.gt(threshold).to(y_pred.scalar_type()));
}

Tensor sparse_matches(const Tensor& y_true, const Tensor& y_pred) {
  return train::class_labels("SparseCategoricalAccuracy", y_true, y_pred).eq(y_pred.argmax(-1));
}

Tensor categorical_matches(const Tensor& y_true, const Tensor& y_pred) {
  return train::like_prediction("CategoricalAccuracy", y_true, y_pred).argmax(-1).eq(y_pred.argmax(-1));
}

// The kind of accuracy that Keras chooses by the shapes.
Tensor matches(const Tensor& y_true, const Tensor& y_pred) {
  if (y_pred.size(-1) == 1) return binary_matches(train::like_prediction("accuracy", y_true, y_pred), y_pred, 0.5);
  const bool sparse = y_true.dim() < y_pred.dim() || y_true.size(-1) == 1;
  return sparse ? sparse_matches(y_true, y_pred) : categorical_matches(y_true, y_pred);
}

// The label's output is finite and fewer than k are above it: ties count in its favour, as in tf.math.in_top_k.
Tensor in_top_k(const Tensor& labels, const Tensor& y_pred, int k) {
  const auto own = y_pred.gather(-1, labels.unsqueeze(-1));
  return y_pred.gt(own).sum(-1).lt(k).logical_and(own.isfinite().squeeze(-1));
}

// Returns the predictions that count as positive.
Tensor positives(const Tensor& y_pred, const PrecisionOptions& options) {
  if (!options.top_k) return y_pred.gt(options.threshold.value_or(0.5));
  auto chosen = at::zeros_like(y_pred, at::kBool);
  chosen.scatter_(-1, std::get<1>(y_pred.topk(*options.top_k, -1)), true);
  return options.threshold ? chosen.logical_and(y_pred.gt(*options.threshold)) : chosen;
}

// True positives, divided by the positives that were predicted (precision), or by the actual ones (recall).
Metric positive_share(const std::string& name, bool of_predicted, const PrecisionOptions& options) {
  const auto check = [&](bool holds, const char* option, double value, const char* allowed) {
    require(holds, text(name, ": ", option), value, allowed);
  };
  if (options.threshold) check(!std::isnan(*options.threshold), "threshold", *options.threshold, "a number");
  if (options.top_k) check(*options.top_k >= 1, "top_k", *options.top_k, "at least 1");
  if (options.class_id) check(*options.class_id >= 0, "class_id", *options.class_id, "0 or more");
  const auto add = [name, of_predicted, options](std::span<double> state, const Tensor& y_true, const Tensor& y_pred,
                                                 const Tensor& sample_weight) {
    auto predicted = positives(y_pred, options);
    auto actual = train::shares_like_prediction(name.c_str(), y_true, y_pred).ne(0);
    if (options.class_id) {
      predicted = predicted.select(-1, *options.class_id);
      actual = actual.select(-1, *options.class_id);
    }
    auto hits = predicted.logical_and(actual).to(at::kDouble);
    auto all = (of_predicted ? predicted : actual).to(at::kDouble);
    if (sample_weight.defined()) {
      const auto weight = train::weight_like(sample_weight, all);
      hits = hits * weight;
      all = all * weight;
    }
    state[0] += hits.sum().item<double>();
    state[1] += all.sum().item<double>();
  };
  return Metric(std::make_shared<Ratio>(name, Mode::max, add));
}

Metric metric_by_name(const std::string& name) {
  if (name == "accuracy" || name == "acc") return share_of(name, &matches);
  if (name == "binary_accuracy") return BinaryAccuracy();
  if (name == "categorical_accuracy") return CategoricalAccuracy();
  if (name == "sparse_categorical_accuracy") return SparseCategoricalAccuracy();
  if (name == "top_k_categorical_accuracy") return TopKCategoricalAccuracy();
  if (name == "sparse_top_k_categorical_accuracy") return SparseTopKCategoricalAccuracy();
  if (name == "precision") return Precision();
  if (name == "recall") return Recall();
  if (name == "mse" || name == "mean_squared_error") return MeanSquaredErrorMetric(name);
  if (name == "mae" || name == "mean_absolute_error") return MeanAbsoluteErrorMetric(name);
  throw InvalidArgument(
      text("no metric is called \"", name,
           "\"; there are accuracy, binary_accuracy, categorical_accuracy, "
           "sparse_categorical_accuracy, top_k_categorical_accuracy, sparse_top_k_categorical_accuracy, "
           "precision, recall, mse, mae"));
}

int checked(const TopKOptions& options) {
  require(options.k >= 1, "top-k accuracy: k", options.k, "at least 1");
  return options.k;
}

}  // namespace

Metric::Metric(std::shared_ptr<const MetricFunction> function) : function_(std::move(function)) {
  if (function_ == nullptr) throw InvalidArgument("Metric: the function is null");
}
Metric::Metric(const char* name) : Metric(metric_by_name(name)) {}
Metric::Metric(const std::string& name) : Metric(metric_by_name(name)) {}

void MetricState::merge(const MetricState& other) {
  for (std::size_t i = 0; i < sums_.size(); ++i) sums_[i] += other.sums_[i];
}

Accuracy::Accuracy(std::string name)
    : Metric(share_of(std::move(name), [](const Tensor& y_true, const Tensor& y_pred) {
        return train::like_prediction("Accuracy", y_true, y_pred).eq(y_pred);
      })) {}

BinaryAccuracy::BinaryAccuracy(BinaryAccuracyOptions options, std::string name)
    : Metric(share_of(std::move(name), [options](const Tensor& y_true, const Tensor& y_pred) {
        return binary_matches(train::shares_like_prediction("BinaryAccuracy", y_true, y_pred), y_pred,
                              options.threshold);
      })) {}

CategoricalAccuracy::CategoricalAccuracy(std::string name) : Metric(share_of(std::move(name), &categorical_matches)) {}
SparseCategoricalAccuracy::SparseCategoricalAccuracy(std::string name)
    : Metric(share_of(std::move(name), &sparse_matches)) {}

TopKCategoricalAccuracy::TopKCategoricalAccuracy(TopKOptions options, std::string name)
    : Metric(share_of(std::move(name), [k = checked(options)](const Tensor& y_true, const Tensor& y_pred) {
        return in_top_k(train::like_prediction("TopKCategoricalAccuracy", y_true, y_pred).argmax(-1), y_pred, k);
      })) {}

SparseTopKCategoricalAccuracy::SparseTopKCategoricalAccuracy(TopKOptions options, std::string name)
    : Metric(share_of(std::move(name), [k = checked(options)](const Tensor& y_true, const Tensor& y_pred) {
        return in_top_k(train::class_labels("SparseTopKCategoricalAccuracy", y_true, y_pred), y_pred, k);
      })) {}

Precision::Precision(PrecisionOptions options, std::string name)
    : Metric(positive_share(name, /*of_predicted=*/true, options)) {}
Recall::Recall(PrecisionOptions options, std::string name)
    : Metric(positive_share(name, /*of_predicted=*/false, options)) {}

MeanSquaredErrorMetric::MeanSquaredErrorMetric(std::string name)
    : Metric(error_of(std::move(name), [](const Tensor& y_true, const Tensor& y_pred) {
        return (train::like_prediction("MeanSquaredError", y_true, y_pred) - y_pred).square();
      })) {}

MeanAbsoluteErrorMetric::MeanAbsoluteErrorMetric(std::string name)
    : Metric(error_of(std::move(name), [](const Tensor& y_true, const Tensor& y_pred) {
        return (train::like_prediction("MeanAbsoluteError", y_true, y_pred) - y_pred).abs();
      })) {}

Mean::Mean(std::string name)
    : Metric(mean_of(std::move(name), Mode::automatic, [](const Tensor&, const Tensor& y_pred) { return y_pred; })) {}

}  // namespace lockstep
