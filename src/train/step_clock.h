// The times of a step's parts.
#pragma once

#include <chrono>

namespace lockstep::train {

// Adds the time since it was made, or since the last call, to one of StepTimes' sums.
class Lap {
 public:
  void add_to(double& seconds) {
    const auto now = std::chrono::steady_clock::now();
    seconds += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace lockstep::train
