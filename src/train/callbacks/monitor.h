// Which of two values of a monitored log is better.
#pragma once

#include <string>

#include "lockstep/callbacks.h"

namespace lockstep {

inline bool up_is_better(Mode mode, const std::string& name) {
  if (mode != Mode::automatic) return mode == Mode::max;
  for (const char* part : {"acc", "auc", "precision", "recall"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

// False when either is NaN.
inline bool is_better(Mode mode, const std::string& name, double value, double than) {
  return up_is_better(mode, name) ? value > than : value < than;
}

}  // namespace lockstep
