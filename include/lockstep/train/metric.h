// Metrics. Names, options and formulas are those of keras.metrics.
//
// A metric's state is a few sums in double, so the states of replicas, batches and shards are put together exactly by
// adding.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/ops/tensor.h"
#include "lockstep/train/logs.h"

namespace lockstep {

// The description of a metric. Immutable; any thread. The base of one of your own.
class MetricFunction {
 public:
  virtual ~MetricFunction() = default;
  virtual std::string name() const = 0;
  virtual std::size_t state_size() const = 0;

  // Adds a batch to the state. sample_weight: [batch] or the shape of the metric's values; undefined for none.
  virtual void update(std::span<double> state, const Tensor& y_true, const Tensor& y_pred,
                      const Tensor& sample_weight) const = 0;
  virtual double result(std::span<const double> state) const = 0;

  // The way in which the metric gets better, for callbacks with Mode::automatic. automatic: not known, and such
  // callbacks throw InvalidArgument.
  virtual Mode better() const { return Mode::automatic; }
};

// A value: a shared handle to a metric's description.
class Metric {
 public:
  // Throws InvalidArgument for null.
  explicit Metric(std::shared_ptr<const MetricFunction> function);

  // By name, which is then the metric's: "accuracy" or "acc" (the kind that the shapes ask for), "binary_accuracy",
  // "categorical_accuracy", "sparse_categorical_accuracy", "top_k_categorical_accuracy",
  // "sparse_top_k_categorical_accuracy", "precision", "recall", "mse", "mae", and the long names.
  Metric(const char* name);         // NOLINT: Keras takes names too
  Metric(const std::string& name);  // NOLINT

  const MetricFunction& function() const { return *function_; }
  std::string name() const { return function_->name(); }

 private:
  std::shared_ptr<const MetricFunction> function_;
};

// A metric and its state, for a custom loop: one a replica, merged at the end. One thread at a time.
class MetricState {
 public:
  explicit MetricState(Metric metric) : metric_(std::move(metric)), sums_(metric_.function().state_size()) {}

  void update(const Tensor& y_true, const Tensor& y_pred, const Tensor& sample_weight = {}) {
    metric_.function().update(sums_, y_true, y_pred, sample_weight);
  }
  void merge(const MetricState& other);
  void reset() { sums_.assign(sums_.size(), 0.0); }
  double result() const { return metric_.function().result(sums_); }

  const Metric& metric() const { return metric_; }
  std::vector<double>& sums() { return sums_; }
  const std::vector<double>& sums() const { return sums_; }

 private:
  Metric metric_;
  std::vector<double> sums_;
};

// The share of exact matches.
class Accuracy : public Metric {
 public:
  explicit Accuracy(std::string name = "accuracy");
};

struct BinaryAccuracyOptions {
  double threshold = 0.5;
};
class BinaryAccuracy : public Metric {
 public:
  explicit BinaryAccuracy(BinaryAccuracyOptions options = {}, std::string name = "binary_accuracy");
};
class CategoricalAccuracy : public Metric {
 public:
  explicit CategoricalAccuracy(std::string name = "categorical_accuracy");
};
class SparseCategoricalAccuracy : public Metric {
 public:
  explicit SparseCategoricalAccuracy(std::string name = "sparse_categorical_accuracy");
};

struct TopKOptions {
  int k = 5;
};
class TopKCategoricalAccuracy : public Metric {
 public:
  explicit TopKCategoricalAccuracy(TopKOptions options = {}, std::string name = "top_k_categorical_accuracy");
};
class SparseTopKCategoricalAccuracy : public Metric {
 public:
  explicit SparseTopKCategoricalAccuracy(TopKOptions options = {},
                                         std::string name = "sparse_top_k_categorical_accuracy");
};

// A prediction counts as positive above the threshold, or, with top_k, among the k largest of its example; class_id
// looks at one class alone.
struct PrecisionOptions {
  std::optional<double> threshold = {};  // 0.5, or none with top_k
  std::optional<int> top_k = {};
  std::optional<int> class_id = {};
};
class Precision : public Metric {
 public:
  explicit Precision(PrecisionOptions options = {}, std::string name = "precision");
};
class Recall : public Metric {
 public:
  explicit Recall(PrecisionOptions options = {}, std::string name = "recall");
};

// keras.metrics.MeanSquaredError and MeanAbsoluteError; here losses have those names.
class MeanSquaredErrorMetric : public Metric {
 public:
  explicit MeanSquaredErrorMetric(std::string name = "mean_squared_error");
};
class MeanAbsoluteErrorMetric : public Metric {
 public:
  explicit MeanAbsoluteErrorMetric(std::string name = "mean_absolute_error");
};

// The weighted mean of the values given as y_pred; y_true is not looked at.
class Mean : public Metric {
 public:
  explicit Mean(std::string name = "mean");
};

}  // namespace lockstep
