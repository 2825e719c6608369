#include "elastic/rows.h"

#include <algorithm>
#include <cstddef>
#include <map>

namespace lockstep::elastic {
namespace {

// Makes as many rows as `parts` allows: parts[p] lists those that have part p.
template <class Item>
std::vector<Item> put_together(const std::vector<std::vector<Item>>& parts) {
  const auto fewest =
      std::min_element(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
  std::vector<Item> rows;
  for (std::size_t row = 0; row < fewest->size(); ++row) {
    for (const auto& of_part : parts) rows.push_back(of_part[row]);
  }
  return rows;
}

}  // namespace

std::vector<int> whole_rows(const std::vector<int>& remaining, int row_size) {
  std::map<int, std::vector<int>> rows;
  for (const int rank : remaining) rows[rank / row_size].push_back(rank);
  std::vector<int> ranks;
  std::vector<std::vector<int>> others(static_cast<std::size_t>(row_size));  // [part]
  for (const auto& [row, of_row] : rows) {
    if (static_cast<int>(of_row.size()) == row_size) {
      ranks.insert(ranks.end(), of_row.begin(), of_row.end());
    } else {
      for (const int rank : of_row) others[static_cast<std::size_t>(rank % row_size)].push_back(rank);
    }
  }
  const auto more = put_together(others);
  ranks.insert(ranks.end(), more.begin(), more.end());
  return ranks;
}

std::vector<Process> whole_rows(const std::vector<Process>& newcomers, int row_size) {
  std::vector<std::vector<Process>> parts(static_cast<std::size_t>(row_size));
  for (const auto& newcomer : newcomers) {
    if (newcomer.part >= 0 && newcomer.part < row_size)
      parts[static_cast<std::size_t>(newcomer.part)].push_back(newcomer);
  }
  return put_together(parts);
}

}  // namespace lockstep::elastic
