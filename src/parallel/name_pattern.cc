#include "parallel/name_pattern.h"

#include <algorithm>
#include <sstream>

#include "base/near_names.h"
#include "base/text.h"

namespace lockstep::parallel {
namespace {

std::vector<std::string> parts_of(const std::string& name) {
  std::vector<std::string> parts;
  std::istringstream in(name);
  for (std::string part; std::getline(in, part, '.');) parts.push_back(part);
  return parts;
}

// The name with "*" where the pattern has it.
std::string masked(const std::string& name, const std::vector<std::string>& pattern) {
  auto parts = parts_of(name);
  for (std::size_t i = 0; parts.size() == pattern.size() && i < parts.size(); ++i) {
    if (pattern[i] == "*") parts[i] = "*";
  }
  return join(parts, ".");
}

}  // namespace

bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] != '*') return !name.empty() && name[0] == pattern[0] && matches(pattern.substr(1), name.substr(1));
  for (std::size_t length = 0;; ++length) {
    if (matches(pattern.substr(1), name.substr(length))) return true;
    if (length == name.size() || name[length] == '.') return false;
  }
}

bool matches_any(std::string_view pattern, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(), [&](const auto& name) { return matches(pattern, name); });
}

std::string suggestion(const std::string& pattern, const std::vector<std::string>& names) {
  std::vector<std::string> candidates;
  for (const auto& name : names) {
    auto candidate = masked(name, parts_of(pattern));
    if (std::find(candidates.begin(), candidates.end(), candidate) == candidates.end()) candidates.push_back(candidate);
  }
  const auto near = near_names(pattern, candidates);
  return near.empty() ? "there are " + first_of(names) : "did you mean " + join(near, " or ") + "?";
}

}  // namespace lockstep::parallel
