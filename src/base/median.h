// The median of some values.
#pragma once

#include <algorithm>
#include <vector>

namespace lockstep {

// The mean of the two in the middle where their number is even. Not of none.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace lockstep
