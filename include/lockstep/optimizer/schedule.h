// Learning rates: a number, or a schedule over the optimizer's iterations. Torch-free values; any thread may read them.
// Names, options and formulas are those of keras.optimizers.schedules.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

class LearningRate {
 public:
  // Constant. Throws InvalidArgument unless finite and >= 0.
  LearningRate(double value);  // NOLINT: a number is a learning rate

  // Your own schedule: the rate of the update that follows `iteration` updates (0 before the first).
  explicit LearningRate(std::function<double(std::int64_t iteration)> schedule);

  double at(std::int64_t iteration) const { return schedule_(iteration); }

 private:
  std::function<double(std::int64_t)> schedule_;
};

struct ExponentialDecayOptions {
  std::int64_t decay_steps = 1000;
  double decay_rate = 0.96;
  bool staircase = false;  // decay in whole steps only
};

// initial * decay_rate ^ (iteration / decay_steps)
class ExponentialDecay : public LearningRate {
 public:
  explicit ExponentialDecay(double initial_learning_rate, ExponentialDecayOptions options = {});
};

// values[0] up to and including iteration boundaries[0], values[1] up to and including boundaries[1], ..., then the
// last value. Throws InvalidArgument unless values has one element more than boundaries, and boundaries grow.
class PiecewiseConstantDecay : public LearningRate {
 public:
  PiecewiseConstantDecay(std::vector<std::int64_t> boundaries, std::vector<double> values);
};

struct CosineDecayOptions {
  double alpha = 0;               // the last rate, as a fraction of the first
  double warmup_target = 0;       // with warmup_steps > 0: the rate that the warm-up rises to; then decays from
  std::int64_t warmup_steps = 0;  // linear, from initial_learning_rate
};

// Half a cosine from initial_learning_rate (or warmup_target) down over decay_steps iterations (Loshchilov, Hutter
// 2016).
class CosineDecay : public LearningRate {
 public:
  CosineDecay(double initial_learning_rate, std::int64_t decay_steps, CosineDecayOptions options = {});
};

// Linear from 0 over `steps` iterations to the rate that `then` gives at that iteration (Goyal et al. 2017).
class WarmUp : public LearningRate {
 public:
  WarmUp(LearningRate then, std::int64_t steps);
};

}  // namespace lockstep
