#include "optimizer/rules.h"

#include <array>
#include <iomanip>
#include <limits>

#include "base/text.h"
#include "kernels/update.h"
#include "lockstep/base/error.h"
#include "lockstep/optimizer/optimizer.h"

namespace lockstep::optimizer {

using kernels::update_kernels;

template <class T>
void SGDRule::apply(const UpdateStep& step, std::span<T> value, std::span<const T> gradient,
                    std::span<T* const> state) const {
  const auto& kernel = update_kernels<T>();
  const double rate = step.learning_rate;
  if (options_.momentum == 0) {
    kernel.sgd(value.data(), gradient.data(), static_cast<T>(rate), value.size());
  } else {
    kernel.sgd_momentum(value.data(), gradient.data(), state[0], {rate, options_.momentum, options_.nesterov},
                        value.size());
  }
}

template <class T>
void AdamRule::apply(const UpdateStep& step, std::span<T> value, std::span<const T> gradient,
                     std::span<T* const> state) const {
  update_kernels<T>().adam(value.data(), gradient.data(), state[0], state[1], options_.amsgrad ? state[2] : nullptr,
                           {rate(step), 1 - options_.beta_1, 1 - options_.beta_2, options_.epsilon}, value.size());
}

template <class T>
void RMSpropRule::apply(const UpdateStep& step, std::span<T> value, std::span<const T> gradient,
                        std::span<T* const> state) const {
  T* mean = options_.centered ? state[1] : nullptr;
  T* velocity = options_.momentum > 0 ? state.back() : nullptr;
  update_kernels<T>().rmsprop(value.data(), gradient.data(), state[0], mean, velocity,
                              {step.learning_rate, options_.rho, options_.momentum, options_.epsilon}, value.size());
}

template <class T>
void AdagradRule::apply(const UpdateStep& step, std::span<T> value, std::span<const T> gradient,
                        std::span<T* const> state) const {
  update_kernels<T>().adagrad(value.data(), gradient.data(), state[0], static_cast<T>(step.learning_rate),
                              static_cast<T>(options_.epsilon), value.size());
}

}  // namespace lockstep::optimizer

namespace lockstep {

namespace {

// The settings that all options structs share.
template <class Options>
OptimizerOptions common(const Options& o) {
  return {.learning_rate = o.learning_rate,
          .weight_decay = o.weight_decay,
          .clipnorm = o.clipnorm,
          .clipvalue = o.clipvalue,
          .global_clipnorm = o.global_clipnorm};
}

void require_fraction(const char* name, double value) {
  if (!(value >= 0 && value < 1))
    throw InvalidArgument(text(name, " is ", value, "; it must be at least 0 and below 1"));
}

void require_not_negative(const char* name, double value) {
  if (!(value >= 0) || std::isinf(value)) throw InvalidArgument(text(name, " is ", value, "; it must be 0 or more"));
}

AdamOptions checked(AdamOptions options) {
  require_fraction("Adam: beta_1", options.beta_1);
  require_fraction("Adam: beta_2", options.beta_2);
  require_not_negative("Adam: epsilon", options.epsilon);
  return options;
}

SGDOptions checked(SGDOptions options) {
  if (!(options.momentum >= 0 && options.momentum <= 1)) {
    throw InvalidArgument(text("SGD: momentum is ", options.momentum, "; it must be from 0 to 1"));
  }
  return options;
}

RMSpropOptions checked(RMSpropOptions options) {
  require_fraction("RMSprop: rho", options.rho);
  require_not_negative("RMSprop: momentum", options.momentum);
  require_not_negative("RMSprop: epsilon", options.epsilon);
  return options;
}

AdagradOptions checked(AdagradOptions options) {
  require_not_negative("Adagrad: initial_accumulator_value", options.initial_accumulator_value);
  require_not_negative("Adagrad: epsilon", options.epsilon);
  return options;
}

AdamOptions with_default_decay(AdamOptions options) {
  if (!options.weight_decay) options.weight_decay = 0.004;
  return checked(options);
}

OptimizerOptions scaled(OptimizerOptions options, LossScaleOptions scale) {
  if (options.loss_scale) throw InvalidArgument("LossScaleOptimizer: the inner optimizer scales the loss already");
  options.loss_scale = scale;
  return options;
}

Optimizer by_name(const std::string& name) {
  if (name == "sgd") return SGD();
  if (name == "adam") return Adam();
  if (name == "adamw") return AdamW();
  if (name == "rmsprop") return RMSprop();
  if (name == "adagrad") return Adagrad();
  throw InvalidArgument(text("no optimizer is called \"", name, "\"; there are sgd, adam, adamw, rmsprop, adagrad"));
}

}  // namespace

Optimizer::Optimizer(std::shared_ptr<const UpdateRule> rule, OptimizerOptions options)
    : rule_(std::move(rule)), options_(std::move(options)) {
  if (!rule_) throw InvalidArgument("Optimizer: the update rule is null");
  int kinds = 0;
  for (const auto& [name, bound] :
       {std::pair("clipnorm", options_.clipnorm), std::pair("clipvalue", options_.clipvalue),
        std::pair("global_clipnorm", options_.global_clipnorm)}) {
    if (!bound) continue;
    ++kinds;
    if (!(*bound > 0) || std::isinf(*bound))
      throw InvalidArgument(text(name, " is ", *bound, "; it must be above 0, and finite"));
  }
  if (kinds > 1) throw InvalidArgument("only one of clipnorm, clipvalue and global_clipnorm can be set");
  if (options_.weight_decay) require_not_negative("weight_decay", *options_.weight_decay);
  if (!options_.loss_scale) return;
  const auto& [scale, steps] = *options_.loss_scale;
  if (!(scale > 0) || std::isinf(scale))
    throw InvalidArgument(text("initial_scale is ", scale, "; it must be above 0"));
  if (steps < 1) throw InvalidArgument(text("dynamic_growth_steps is ", steps, "; it must be 1 or more"));
}

Optimizer::Optimizer(const char* name) : Optimizer(by_name(name)) {}

SGD::SGD(SGDOptions options) : Optimizer(std::make_shared<optimizer::SGDRule>(checked(options)), common(options)) {}
Adam::Adam(AdamOptions options)
    : Optimizer(std::make_shared<optimizer::AdamRule>("adam", checked(options)), common(options)) {}
AdamW::AdamW(AdamOptions options)
    : Optimizer(std::make_shared<optimizer::AdamRule>("adamw", checked(options)), common(with_default_decay(options))) {
}
RMSprop::RMSprop(RMSpropOptions options)
    : Optimizer(std::make_shared<optimizer::RMSpropRule>(checked(options)), common(options)) {}
Adagrad::Adagrad(AdagradOptions options)
    : Optimizer(std::make_shared<optimizer::AdagradRule>(checked(options)), common(options)) {}
LossScaleOptimizer::LossScaleOptimizer(const Optimizer& inner, LossScaleOptions options)
    : Optimizer(inner.shared_rule(), scaled(inner.options(), options)) {}

}  // namespace lockstep

namespace lockstep::optimizer {

namespace {

std::string exact(double number) { return text(std::setprecision(std::numeric_limits<double>::max_digits10), number); }

std::string text_of(const std::optional<double>& setting) { return setting ? exact(*setting) : "none"; }

std::string states_of(const UpdateRule& rule) {
  std::vector<std::string> all;
  for (const auto& state : rule.states()) all.push_back(text(state.name, " from ", state.initial_value));
  return all.empty() ? "none" : join(all);
}

// Three numbers after two updates.
std::string result_of(const Optimizer& optimizer) {
  constexpr std::array<double, 3> kGradient{0.1, -3, 2e-4};
  constexpr int kUpdates = 2;
  constexpr double kRate = 0.01;
  std::array<double, 3> value{0.5, -2, 1e-3};
  std::vector<std::array<double, 3>> states;
  std::vector<double*> pointers;
  for (const auto& spec : optimizer.rule().states()) {
    states.emplace_back().fill(spec.initial_value);
  }
  for (auto& state : states) pointers.push_back(state.data());
  for (int update = 1; update <= kUpdates; ++update) {
    optimizer.rule().update({.iteration = update, .learning_rate = kRate}, std::span<double>(value),
                            std::span<const double>(kGradient), pointers);
  }
  return text(exact(value[0]), ", ", exact(value[1]), ", ", exact(value[2]));
}

}  // namespace

std::string describe(const Optimizer& optimizer) {
  const auto& options = optimizer.options();
  std::vector<std::string> rates;
  for (const std::int64_t iteration : {0, 1, 1000}) rates.push_back(exact(options.learning_rate.at(iteration)));
  const auto& scale = options.loss_scale;
  const auto& ranks = options.gradient_ranks;
  return text("rule ", optimizer.rule().name(), "\nstates ", states_of(optimizer.rule()),
              "\nlearning rates at iterations 0, 1, 1000 ", join(rates), "\nweight_decay ",
              text_of(options.weight_decay), "\nclipnorm ", text_of(options.clipnorm), "\nclipvalue ",
              text_of(options.clipvalue), "\nglobal_clipnorm ", text_of(options.global_clipnorm), "\nloss scale ",
              scale ? text(scale->initial_scale, " growing every ", scale->dynamic_growth_steps) : "none",
              "\ngradient_ranks ",
              ranks ? text("own_data ", ranks->own_data, ", sum ", ranks->sum, ", gradient_dtype ",
                           ranks->gradient_dtype ? name_of(*ranks->gradient_dtype) : "none")
                    : "none",
              "\nhyperparameters, by what three numbers become ", result_of(optimizer));
}

}  // namespace lockstep::optimizer
