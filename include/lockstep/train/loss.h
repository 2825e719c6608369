// Losses. Values; any thread may call one. Names, options and formulas are those of keras.losses.
//
// y_pred is [batch, ...]; a loss first gives one value for each example (and position), then reduces them.
#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <type_traits>

#include "lockstep/ops/tensor.h"

namespace lockstep {

enum class Reduction {
  sum_over_batch_size,      // sum of weighted values / number of values
  sum,                      // sum of weighted values
  mean_with_sample_weight,  // sum of weighted values / sum of weights
};

class Loss {
 public:
  // One value for each example: [batch], or [batch, ...] with a value for each position. A scalar counts as the mean of
  // the batch. Must be differentiable with respect to y_pred.
  using Function = std::function<Tensor(const Tensor& y_true, const Tensor& y_pred)>;

  // A loss of your own.
  Loss(std::string name, Function function, Reduction reduction = Reduction::sum_over_batch_size);

  // A loss of a lambda or function pointer, by the name "loss".
  template <class F>
  requires(!std::derived_from<F, Loss> && !std::convertible_to<F, std::string>) Loss(const F& function)
      : Loss("loss", checked(function)) {}  // NOLINT: Keras takes functions

  // By name, with defaults: "mse", "mae", "huber", "binary_crossentropy", "categorical_crossentropy",
  // "sparse_categorical_crossentropy", and the long names. Throws InvalidArgument for any other.
  Loss(const char* name);         // NOLINT: and names
  Loss(const std::string& name);  // NOLINT

  // The reduced loss, a scalar. sample_weight: [batch], or the values' shape; undefined for none.
  Tensor operator()(const Tensor& y_true, const Tensor& y_pred, const Tensor& sample_weight = {}) const;

  // The loss as a sum and its divisor, so that parts of a batch can be put together exactly.
  struct Terms {
    Tensor sum;
    double divisor = 0;
  };
  Terms terms(const Tensor& y_true, const Tensor& y_pred, const Tensor& sample_weight = {}) const;

  // Sum and divisor for a step that is compiled, which may not read values, and whose batch was filled up with examples
  // that do not count. counts: [batch], 1 for those that do, else 0. Throws InvalidArgument where the loss gives one
  // number for the batch.
  struct MaskedTerms {
    Tensor sum, divisor;  // scalars; the divisor is 1 with Reduction::sum
  };
  MaskedTerms masked_terms(const Tensor& y_true, const Tensor& y_pred, const Tensor& sample_weight,
                           const Tensor& counts) const;

  const std::string& name() const { return name_; }
  Reduction reduction() const { return reduction_; }

 private:
  template <class F>
  static Function checked(const F& function) {
    constexpr bool is_loss = std::is_invocable_r_v<Tensor, F&, const Tensor&, const Tensor&>;
    static_assert(is_loss,
                  "a loss is a name, a Loss, or a function Tensor(const Tensor& y_true, const Tensor& y_pred)");
    if constexpr (is_loss) return function;
    return {};
  }

  Tensor values(const Tensor& y_true, const Tensor& y_pred) const;

  std::string name_;
  Function function_;
  Reduction reduction_;
};

struct CrossentropyOptions {
  bool from_logits = false;
  double label_smoothing = 0;  // not for sparse labels
  Reduction reduction = Reduction::sum_over_batch_size;
};

// y_true: integers [batch, ...] (or [batch, ..., 1]); y_pred: [batch, ..., classes].
// Throws InvalidArgument naming a label outside of the classes.
class SparseCategoricalCrossentropy : public Loss {
 public:
  explicit SparseCategoricalCrossentropy(CrossentropyOptions options = {});
};

// y_true: one-hot or probabilities, in y_pred's shape [batch, ..., classes].
class CategoricalCrossentropy : public Loss {
 public:
  explicit CategoricalCrossentropy(CrossentropyOptions options = {});
};

// y_true: 0 or 1, in y_pred's shape; the mean over the last dimension.
class BinaryCrossentropy : public Loss {
 public:
  explicit BinaryCrossentropy(CrossentropyOptions options = {});
};

struct RegressionOptions {
  Reduction reduction = Reduction::sum_over_batch_size;
};

// Means over the last dimension.
class MeanSquaredError : public Loss {
 public:
  explicit MeanSquaredError(RegressionOptions options = {});
};
class MeanAbsoluteError : public Loss {
 public:
  explicit MeanAbsoluteError(RegressionOptions options = {});
};

struct HuberOptions {
  double delta = 1;
  Reduction reduction = Reduction::sum_over_batch_size;
};
class Huber : public Loss {
 public:
  explicit Huber(HuberOptions options = {});
};

}  // namespace lockstep
