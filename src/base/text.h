// text(a, b, ...): the arguments printed one after the other, for messages.
#pragma once

#include <sstream>
#include <string>

namespace lockstep {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
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

}  // namespace lockstep
