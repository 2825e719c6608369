// The factor of LossScaleOptimizer while it trains.
#pragma once

#include <cstdint>
#include <optional>

#include "lockstep/optimizer.h"

namespace lockstep {

// 1, always, without options. One thread at a time.
class LossScale {
 public:
  explicit LossScale(const std::optional<LossScaleOptions>& options)
      : options_(options), value_(options ? options->initial_scale : 1) {}

  bool used() const { return options_.has_value(); }
  double value() const { return value_; }
  std::int64_t steps() const { return steps_; }  // updates since the value moved

  // After a step, whose gradients were finite or not.
  void move(bool finite) {
    if (!used()) return;
    const bool doubles = finite && ++steps_ >= options_->dynamic_growth_steps;
    if (finite && !doubles) return;
    value_ *= doubles ? 2 : 0.5;
    steps_ = 0;
  }
  void restore(double value, std::int64_t steps) {
    value_ = value;
    steps_ = steps;
  }

 private:
  std::optional<LossScaleOptions> options_;
  double value_;
  std::int64_t steps_ = 0;
};

}  // namespace lockstep
