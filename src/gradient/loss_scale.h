// The factor of LossScaleOptimizer while it trains.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "lockstep/optimizer/optimizer.h"

namespace lockstep::gradient {

// Without options always 1. Else between 1 (or the initial scale, if that is less) and 2^64: float could not hold a
// larger divisor of gradients. One thread at a time.
class LossScale {
 public:
  explicit LossScale(const std::optional<LossScaleOptions>& options) : options_(options) { restart(); }

  bool used() const { return options_.has_value(); }
  double value() const { return value_; }
  std::int64_t steps() const { return steps_; }      // updates since the value moved
  std::int64_t skipped() const { return skipped_; }  // steps in all whose gradients were not finite

  // Called after each step with whether its gradients were finite. Returns false where they were not, even with the
  // smallest scale.
  bool move(bool finite) {
    if (!used()) return true;
    if (!finite) ++skipped_;
    const bool doubles = finite && ++steps_ >= options_->dynamic_growth_steps;
    if (finite && !doubles) return true;
    const double least = std::min(1.0, options_->initial_scale), before = value_;
    value_ = std::clamp(value_ * (doubles ? 2 : 0.5), least, kMost);
    steps_ = 0;
    return finite || before > least;
  }
  void restore(double value, std::int64_t steps, std::int64_t skipped) {
    value_ = value;
    steps_ = steps;
    skipped_ = skipped;
  }
  void restart() { restore(options_ ? options_->initial_scale : 1, 0, 0); }

 private:
  static constexpr double kMost = 18446744073709551616.0;  // 2^64

  std::optional<LossScaleOptions> options_;
  double value_ = 1;
  std::int64_t steps_ = 0, skipped_ = 0;
};

}  // namespace lockstep::gradient
