// text(a, b, ...): the arguments printed one after the other, for messages. near_names finds the names that a wrong one
// probably meant; require throws for a wrong value.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Parses `digits` as a decimal integer with nothing before or after it; nothing where it is not one.
template <class T = std::int64_t>
std::optional<T> whole_number(std::string_view digits) {
  T number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return number;
}

// The first lines in which two different texts differ; "nothing" for one that has ended.
inline std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b) {
  std::istringstream lines_of_a(a), lines_of_b(b);
  std::string one, other;
  while (one == other && (lines_of_a || lines_of_b)) {
    if (!std::getline(lines_of_a, one)) one = "nothing";
    if (!std::getline(lines_of_b, other)) other = "nothing";
  }
  return {one, other};
}

// "a, b, c", for messages that list what is allowed.
template <class Range>
std::string join(const Range& items, const char* separator = ", ") {
  std::ostringstream out;
  const char* before = "";
  for (const auto& item : items) {
    out << before << item;
    before = separator;
  }
  return out.str();
}

// "a, b, c": the names in a map, or of other pairs that begin with a name.
template <class Named>
std::string names_in(const Named& named) {
  std::vector<std::string> names;
  for (const auto& [name, value] : named) names.push_back(name);
  return join(names);
}

// Throws InvalidArgument unless it `holds`: "`what` is `value`; it must be `allowed`".
template <class Value, class... Allowed>
void require(bool holds, const std::string& what, const Value& value, const Allowed&... allowed) {
  if (!holds) throw InvalidArgument(text(what, " is ", value, "; it must be ", allowed...));
}

// "a, b, c and 7 more".
template <class Names>
std::string first_of(const Names& names, std::size_t most = 3) {
  const auto shown = std::min(most, names.size());
  const auto first = join(std::vector<std::string>(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown)));
  return shown == names.size() ? first : text(first, " and ", names.size() - shown, " more");
}

// Finds the existing names that a wrong name probably meant, for messages. Returns at most three of `names`, the
// nearest to `name` first, by the number of characters that differ (Levenshtein 1965). A name that differs in more than
// half of its characters is left out.
std::vector<std::string> near_names(const std::string& name, std::vector<std::string> names);

}  // namespace lockstep
