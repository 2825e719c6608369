#include "parallel/name_pattern.h"

namespace lockstep::parallel {

bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] != '*') return !name.empty() && name[0] == pattern[0] && matches(pattern.substr(1), name.substr(1));
  for (std::size_t length = 0;; ++length) {
    if (matches(pattern.substr(1), name.substr(length))) return true;
    if (length == name.size() || name[length] == '.') return false;
  }
}

}  // namespace lockstep::parallel
