// Which of two values of a monitored log is better.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/train/callbacks.h"
#include "train/model_impl.h"

namespace lockstep::train {

// Returns `mode`, or where it is automatic, the mode that the monitored metric has, as in Keras. Throws InvalidArgument
// where no metric of that name has one.
inline Mode resolved(const char* callback, Mode mode, const std::string& monitor, const Model& model) {
  if (mode != Mode::automatic) return mode;
  const auto name = monitor.starts_with("val_") ? monitor.substr(4) : monitor;
  if (name == "loss") return Mode::min;
  const auto& compiled = *unwrap(model).compiled;
  bool is_known = false;
  std::vector<std::string> names{"loss"};
  for (const auto* metrics : {&compiled.metrics, &compiled.weighted_metrics}) {
    for (const auto& metric : *metrics) {
      if (metric.name() == name && metric.function().better() != Mode::automatic) return metric.function().better();
      is_known |= metric.name() == name;
      names.push_back(metric.name());
    }
  }
  if (!is_known) {
    throw InvalidArgument(
        text(callback, ": it monitors ", monitor, ", which no metric is called; there are ", join(names),
             ", and these with val_ in front where fit validates. For a value that a callback of yours "
             "adds to the logs pass .mode = Mode::max or Mode::min"));
  }
  throw InvalidArgument(text(callback, ": it monitors ", monitor, ", of which it is not known whether higher or lower ",
                             "is better: pass .mode = Mode::max or Mode::min"));
}

// Returns the monitored value; none, with a warning, when this epoch has none, as Keras does.
inline std::optional<double> monitored(const char* callback, const std::string& name, const Logs& logs) {
  if (logs.contains(name)) return logs[name];
  log_warning(text(callback, ": this epoch has no ", name, "; there are ", names_in(logs)));
  return std::nullopt;
}

// Compares two values: NaN is worse than anything.
inline bool is_better(Mode mode, double value, double than) {
  if (std::isnan(than)) return !std::isnan(value);
  return mode == Mode::max ? value > than : value < than;
}

}  // namespace lockstep::train
