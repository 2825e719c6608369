// Named numbers in the order in which they were set: what callbacks get and evaluate returns. Torch-free.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class Logs {
 public:
  // The value of `name`. Throws InvalidArgument listing the names that there are.
  double operator[](const std::string& name) const;

  bool contains(const std::string& name) const;
  void set(const std::string& name, double value);

  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }
  bool empty() const { return items_.empty(); }

 private:
  std::vector<std::pair<std::string, double>> items_;
};

// The result of fit: for each name, its value at the end of each epoch.
struct History {
  std::vector<int> epoch;
  std::map<std::string, std::vector<double>> history;

  // The values of `name`. Throws InvalidArgument listing the names that there are.
  const std::vector<double>& operator[](const std::string& name) const;
};

// The way in which a monitored value gets better. automatic: down for the loss, and for a metric as the metric says
// (MetricFunction::better). Callbacks throw InvalidArgument where nothing says so, as in Keras.
enum class Mode { automatic, min, max };

}  // namespace lockstep
