// Finds the existing names that a wrong name probably meant, for messages.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

// Returns at most three of `names`, the nearest to `name` first, by the number of characters that differ (Levenshtein
// 1965). A name that differs in more than half of its characters is left out.
std::vector<std::string> near_names(const std::string& name, std::vector<std::string> names);

}  // namespace lockstep
