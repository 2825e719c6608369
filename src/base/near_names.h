// Which names were probably meant by one that does not exist, for messages.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

// At most three of `names`, the nearest to `name` first, by the number of characters that differ (Levenshtein 1965);
// none that differs in more than half of its characters.
std::vector<std::string> near_names(const std::string& name, std::vector<std::string> names);

}  // namespace lockstep
