// Rows of a mesh: the ranks that have one copy of a model together, each a part of it.
#pragma once

#include <vector>

#include "elastic/members.h"

namespace lockstep::elastic {

// Rank r has part r % row_size of row r / row_size; ranks with the same part have the same state. `remaining` ascends.
// Returns the ranks that make up whole rows, in the order of their next ranks. Rows that are still whole come first, in
// their order; then rows that are put together of ranks whose own rows are broken.
std::vector<int> whole_rows(const std::vector<int>& remaining, int row_size);

// Returns the newcomers that make up whole rows, one row after the other.
std::vector<Process> whole_rows(const std::vector<Process>& newcomers, int row_size);

}  // namespace lockstep::elastic
