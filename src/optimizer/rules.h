// The update rules of keras.optimizers 3. What computes them elsewhere than in host memory reads their options.
#pragma once

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/optimizer/optimizer.h"

namespace lockstep::optimizer {

class SGDRule final : public SpanRule<SGDRule> {
 public:
  explicit SGDRule(SGDOptions options) : options_(std::move(options)) {}
  const SGDOptions& options() const { return options_; }
  std::string name() const override { return "sgd"; }
  std::vector<StateSpec> states() const override {
    return options_.momentum == 0 ? std::vector<StateSpec>{} : std::vector<StateSpec>{{"momentum", 0}};
  }

  template <class T>
  void apply(const UpdateStep& step, std::span<T> value, std::span<const T> gradient, std::span<T* const> state) const;

 private:
  SGDOptions options_;
};

class AdamRule final : public SpanRule<AdamRule> {
 public:
  AdamRule(std::string name, AdamOptions options) : name_(std::move(name)), options_(std::move(options)) {}
  const AdamOptions& options() const { return options_; }
  std::string name() const override { return name_; }
  std::vector<StateSpec> states() const override {
    std::vector<StateSpec> specs{{"m", 0}, {"v", 0}};
    if (options_.amsgrad) specs.push_back({"vhat", 0});
    return specs;
  }

  // The learning rate with the correction for means that began at zero.
  double rate(const UpdateStep& step) const {
    const auto t = static_cast<double>(step.iteration);
    return step.learning_rate * std::sqrt(1 - std::pow(options_.beta_2, t)) / (1 - std::pow(options_.beta_1, t));
  }

  template <class T>
  void apply(const UpdateStep& step, std::span<T> value, std::span<const T> gradient, std::span<T* const> state) const;

 private:
  std::string name_;
  AdamOptions options_;
};

class RMSpropRule final : public SpanRule<RMSpropRule> {
 public:
  explicit RMSpropRule(RMSpropOptions options) : options_(std::move(options)) {}
  const RMSpropOptions& options() const { return options_; }
  std::string name() const override { return "rmsprop"; }
  std::vector<StateSpec> states() const override {
    std::vector<StateSpec> specs{{"velocity", 0}};
    if (options_.centered) specs.push_back({"average_gradient", 0});
    if (options_.momentum > 0) specs.push_back({"momentum", 0});
    return specs;
  }

  template <class T>
  void apply(const UpdateStep& step, std::span<T> value, std::span<const T> gradient, std::span<T* const> state) const;

 private:
  RMSpropOptions options_;
};

class AdagradRule final : public SpanRule<AdagradRule> {
 public:
  explicit AdagradRule(AdagradOptions options) : options_(std::move(options)) {}
  const AdagradOptions& options() const { return options_; }
  std::string name() const override { return "adagrad"; }
  std::vector<StateSpec> states() const override { return {{"accumulator", options_.initial_accumulator_value}}; }

  template <class T>
  void apply(const UpdateStep& step, std::span<T> value, std::span<const T> gradient, std::span<T* const> state) const;

 private:
  AdagradOptions options_;
};

// A description that is equal for optimizers that update equal variables alike. One setting a line. Settings that a
// rule does not expose show in the results of a few updates.
std::string describe(const Optimizer& optimizer);

}  // namespace lockstep::optimizer
