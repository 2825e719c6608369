// Which of two values of a monitored log is better.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/train/callbacks.h"

namespace lockstep::train {

inline bool up_is_better(Mode mode, const std::string& name) {
  if (mode != Mode::automatic) return mode == Mode::max;
  for (const char* part : {"acc", "auc", "precision", "recall"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

// The monitored value; nothing, with a warning, when this epoch has none, as Keras does.
inline std::optional<double> monitored(const char* callback, const std::string& name, const Logs& logs) {
  if (logs.contains(name)) return logs[name];
  std::vector<std::string> names;
  for (const auto& [known, value] : logs) names.push_back(known);
  log_warning(text(callback, ": this epoch has no ", name, "; there are ", join(names)));
  return std::nullopt;
}

// NaN is worse than anything.
inline bool is_better(Mode mode, const std::string& name, double value, double than) {
  if (std::isnan(than)) return !std::isnan(value);
  return up_is_better(mode, name) ? value > than : value < than;
}

}  // namespace lockstep::train
