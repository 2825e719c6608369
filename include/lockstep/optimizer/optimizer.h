// Optimizers: update rules over flat spans of float or double. Torch-free.
//
// An Optimizer is a value that describes how to update; the state (momenta and so on) lives with the variables, once
// for all replicas. Names, defaults and formulas are those of keras.optimizers. Any thread may read an Optimizer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/optimizer/schedule.h"

namespace lockstep {

// A rule knows this about the update that it makes.
struct UpdateStep {
  std::int64_t iteration = 1;  // 1 in the first update
  double learning_rate = 0;
};

// One array of state, as long as the variables, that begins as `initial_value` everywhere.
struct StateSpec {
  std::string name;
  double initial_value = 0;
};

// Moves variables. Several threads call `update` at once, each on other elements; all spans have one length. state[k]
// belongs to states()[k]; the gradient is the mean over the global batch, clipped. `update` must not throw.
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  virtual std::string name() const = 0;
  virtual std::vector<StateSpec> states() const = 0;
  virtual void update(const UpdateStep& step, std::span<float> value, std::span<const float> gradient,
                      std::span<float* const> state) const = 0;
  virtual void update(const UpdateStep& step, std::span<double> value, std::span<const double> gradient,
                      std::span<double* const> state) const = 0;
};

// The base of a rule of your own: write one member template
//   template <class T> void apply(const UpdateStep&, std::span<T> value, std::span<const T> gradient, std::span<T*
//   const> state) const;
template <class Derived>
class SpanRule : public UpdateRule {
 public:
  void update(const UpdateStep& step, std::span<float> value, std::span<const float> gradient,
              std::span<float* const> state) const final {
    static_cast<const Derived&>(*this).template apply<float>(step, value, gradient, state);
  }
  void update(const UpdateStep& step, std::span<double> value, std::span<const double> gradient,
              std::span<double* const> state) const final {
    static_cast<const Derived&>(*this).template apply<double>(step, value, gradient, state);
  }
};

// Settings of LossScaleOptimizer's factor.
struct LossScaleOptions {
  double initial_scale = 32768;
  std::int64_t dynamic_growth_steps = 2000;  // updates in a row after which the scale doubles
};

// Processes that sum their gradients in every step, where the strategy itself has no workers; set by
// horovod::DistributedOptimizer. Parameters are equal at the beginning. Metrics, logs, running statistics and
// checkpoints are each process's own. All processes give the same options.
struct GradientRanks {
  Communicator ranks;
  bool sum = false;  // update by the processes' sum, instead of their mean
  // DType::float16, DType::bfloat16, or DType::int8 (blocks of 256 with a scale, and error feedback): what float
  // gradients are sent as.
  std::optional<DType> gradient_dtype = {};

  // True: each process trains on data of its own, as Horovod's programs do, and one whose data end sooner goes on
  // without examples. False: all give the same data, which are divided by the AutoShardPolicy.
  bool own_data = true;
};

// Every optimizer has these besides its rule. At most one kind of clipping.
struct OptimizerOptions {
  LearningRate learning_rate = 0.001;
  std::optional<double> weight_decay =
      {};                                // decoupled: value -= learning_rate * weight_decay * value, before the update
  std::optional<double> clipnorm = {};   // each variable's gradient is scaled to at most this norm
  std::optional<double> clipvalue = {};  // each element is clipped to [-clipvalue, clipvalue]
  std::optional<double> global_clipnorm = {};  // all gradients together are scaled to at most this norm
  std::optional<LossScaleOptions> loss_scale = {};
  std::optional<GradientRanks> gradient_ranks = {};
};

class Optimizer {
 public:
  // Throws InvalidArgument for more than one kind of clipping, or a setting that is not positive.
  Optimizer(std::shared_ptr<const UpdateRule> rule, OptimizerOptions options);

  // Made by name, with defaults: "sgd", "adam", "adamw", "rmsprop", "adagrad". Throws InvalidArgument for any other.
  Optimizer(const char* name);  // NOLINT: Keras takes names too

  const UpdateRule& rule() const noexcept { return *rule_; }
  const std::shared_ptr<const UpdateRule>& shared_rule() const noexcept { return rule_; }
  const OptimizerOptions& options() const noexcept { return options_; }

 private:
  std::shared_ptr<const UpdateRule> rule_;
  OptimizerOptions options_;
};

struct SGDOptions {
  LearningRate learning_rate = 0.01;
  double momentum = 0;
  bool nesterov = false;
  std::optional<double> weight_decay = {}, clipnorm = {}, clipvalue = {}, global_clipnorm = {};
};
class SGD : public Optimizer {
 public:
  explicit SGD(SGDOptions options = {});
};

// Kingma, Ba 2014; amsgrad: Reddi et al. 2018.
struct AdamOptions {
  LearningRate learning_rate = 0.001;
  double beta_1 = 0.9;
  double beta_2 = 0.999;
  double epsilon = 1e-7;
  bool amsgrad = false;
  std::optional<double> weight_decay = {}, clipnorm = {}, clipvalue = {}, global_clipnorm = {};
};
class Adam : public Optimizer {
 public:
  explicit Adam(AdamOptions options = {});
};

// Loshchilov, Hutter 2017: Adam with weight_decay 0.004 unless set.
class AdamW : public Optimizer {
 public:
  explicit AdamW(AdamOptions options = {});
};

// Hinton 2012; centered: Graves 2013.
struct RMSpropOptions {
  LearningRate learning_rate = 0.001;
  double rho = 0.9;
  double momentum = 0;
  double epsilon = 1e-7;
  bool centered = false;
  std::optional<double> weight_decay = {}, clipnorm = {}, clipvalue = {}, global_clipnorm = {};
};
class RMSprop : public Optimizer {
 public:
  explicit RMSprop(RMSpropOptions options = {});
};

// Duchi, Hazan, Singer 2011.
struct AdagradOptions {
  LearningRate learning_rate = 0.001;
  double initial_accumulator_value = 0.1;
  double epsilon = 1e-7;
  std::optional<double> weight_decay = {}, clipnorm = {}, clipvalue = {}, global_clipnorm = {};
};
class Adagrad : public Optimizer {
 public:
  explicit Adagrad(AdagradOptions options = {});
};

// `inner`, with the loss multiplied before backward and the gradients divided after it, so that small gradients survive
// in float16. A step whose gradients are not finite changes nothing but halves the scale. The policy "mixed_float16"
// wraps a model's optimizer by itself. keras.optimizers.LossScaleOptimizer.
class LossScaleOptimizer : public Optimizer {
 public:
  // Throws InvalidArgument for settings that are not positive, and where `inner` scales already.
  explicit LossScaleOptimizer(const Optimizer& inner, LossScaleOptions options = {});
};

}  // namespace lockstep
