#include "lockstep/optimizer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

void require_positive(const char* name, std::int64_t value) {
  if (value < 1) throw InvalidArgument(text(name, " is ", value, "; it must be at least 1"));
}

}  // namespace

LearningRate::LearningRate(double value) : schedule_([value](std::int64_t) { return value; }) {
  if (!(value >= 0) || std::isinf(value)) {
    throw InvalidArgument(text("learning_rate is ", value, "; it must be a finite number, 0 or more"));
  }
}

LearningRate::LearningRate(std::function<double(std::int64_t)> schedule) : schedule_(std::move(schedule)) {
  if (!schedule_) throw InvalidArgument("the learning rate's schedule is empty; pass a function of the iteration");
}

ExponentialDecay::ExponentialDecay(double initial, ExponentialDecayOptions options)
    : LearningRate([initial, options](std::int64_t iteration) {
        const double power = static_cast<double>(iteration) / static_cast<double>(options.decay_steps);
        return initial * std::pow(options.decay_rate, options.staircase ? std::floor(power) : power);
      }) {
  require_positive("ExponentialDecay: decay_steps", options.decay_steps);
}

PiecewiseConstantDecay::PiecewiseConstantDecay(std::vector<std::int64_t> boundaries, std::vector<double> values)
    : LearningRate([boundaries, values](std::int64_t iteration) {
        const auto boundary = std::lower_bound(boundaries.begin(), boundaries.end(), iteration);
        return values[static_cast<std::size_t>(boundary - boundaries.begin())];
      }) {
  if (values.size() != boundaries.size() + 1) {
    throw InvalidArgument(text("PiecewiseConstantDecay: ", boundaries.size(), " boundaries need ",
                               boundaries.size() + 1, " values, not ", values.size()));
  }
  if (std::adjacent_find(boundaries.begin(), boundaries.end(), std::greater_equal<>()) != boundaries.end()) {
    throw InvalidArgument(
        text("PiecewiseConstantDecay: boundaries are ", join(boundaries), "; each must be above the last"));
  }
}

CosineDecay::CosineDecay(double initial, std::int64_t decay_steps, CosineDecayOptions options)
    : LearningRate([=](std::int64_t iteration) {
        const auto at = static_cast<double>(iteration);
        const auto warmup = static_cast<double>(options.warmup_steps);
        if (at < warmup) return initial + (options.warmup_target - initial) * at / warmup;
        const double first = options.warmup_steps > 0 ? options.warmup_target : initial;
        const double done = std::min(at - warmup, static_cast<double>(decay_steps)) / static_cast<double>(decay_steps);
        const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * done));
        return first * ((1 - options.alpha) * cosine + options.alpha);
      }) {
  require_positive("CosineDecay: decay_steps", decay_steps);
}

WarmUp::WarmUp(LearningRate then, std::int64_t steps)
    : LearningRate([then = std::move(then), steps](std::int64_t iteration) {
        const double fraction = static_cast<double>(iteration) / static_cast<double>(steps);
        return then.at(iteration) * std::min(1.0, fraction);
      }) {
  require_positive("WarmUp: steps", steps);
}

}  // namespace lockstep
