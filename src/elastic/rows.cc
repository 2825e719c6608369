#include "elastic/rows.h"

#include <algorithm>
#include <cstddef>
#include <map>

namespace lockstep::elastic {

std::vector<int> whole_rows(const std::vector<int>& remaining, int row_size) {
  std::map<int, std::vector<int>> rows;
  for (const int rank : remaining) rows[rank / row_size].push_back(rank);
  std::vector<int> ranks;
  std::vector<std::vector<int>> others(static_cast<std::size_t>(row_size));  // [part]
  for (const auto& [row, of_row] : rows) {
    if (static_cast<int>(of_row.size()) == row_size) {
      ranks.insert(ranks.end(), of_row.begin(), of_row.end());
      continue;
    }
    for (const int rank : of_row) others[static_cast<std::size_t>(rank % row_size)].push_back(rank);
  }
  std::size_t more = remaining.size();
  for (const auto& of_part : others) more = std::min(more, of_part.size());
  for (std::size_t row = 0; row < more; ++row) {
    for (const auto& of_part : others) ranks.push_back(of_part[row]);
  }
  return ranks;
}

}  // namespace lockstep::elastic
