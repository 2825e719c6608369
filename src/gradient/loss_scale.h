// The factor of LossScaleOptimizer while it trains.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "lockstep/optimizer/optimizer.h"

namespace lockstep::gradient {

// 1, always, without options. Else from 1 (or the initial scale, if that is less) to 2^64: beyond, float could not hold
// what gradients are divided by. One thread at a time.
class LossScale {
 public:
  explicit LossScale(const std::optional<LossScaleOptions>& options) : options_(options) { restart(); }

  bool used() const { return options_.has_value(); }
  double value() const { return value_; }
  std::int64_t steps() const { return steps_; }  // updates since the value moved

  // After a step, whose gradients were finite or not. Returns false where they are not even with the smallest scale.
  bool move(bool finite) {
    if (!used()) return true;
    const bool doubles = finite && ++steps_ >= options_->dynamic_growth_steps;
    if (finite && !doubles) return true;
    const double least = std::min(1.0, options_->initial_scale), before = value_;
    value_ = std::clamp(value_ * (doubles ? 2 : 0.5), least, kMost);
    steps_ = 0;
    return finite || before > least;
  }
  void restore(double value, std::int64_t steps) {
    value_ = value;
    steps_ = steps;
  }
  void restart() { restore(options_ ? options_->initial_scale : 1, 0); }

 private:
  static constexpr double kMost = 18446744073709551616.0;  // 2^64

  std::optional<LossScaleOptions> options_;
  double value_ = 1;
  std::int64_t steps_ = 0;
};

}  // namespace lockstep::gradient
