#include "base/text.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace lockstep {

namespace {

std::size_t edits(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    auto diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const auto replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

}  // namespace

std::vector<std::string> near_names(const std::string& name, std::vector<std::string> names) {
  std::erase_if(names, [&](const auto& other) { return 2 * edits(name, other) > std::max(name.size(), other.size()); });
  std::stable_sort(names.begin(), names.end(),
                   [&](const auto& a, const auto& b) { return edits(name, a) < edits(name, b); });
  if (names.size() > 3) names.resize(3);
  return names;
}

}  // namespace lockstep
