#include "train/callbacks/file_pattern.h"

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <regex>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

constexpr int kWidest = 200;  // digits; a name of a file has 255 bytes

// Throws InvalidArgument for what is no format of Python's, and for a width or precision that no name of a file has
// room for.
void check_format(const std::string& spec, const std::string& whole) {
  static const std::regex kFormat("0?([0-9]*)d|0?([0-9]*)(\\.([0-9]+))?[feg]");
  std::smatch parts;
  if (!std::regex_match(spec, parts, kFormat)) {
    throw InvalidArgument(
        text("ModelCheckpoint: \"", spec, "\" in ", whole, " is no format; such as {epoch:02d} or {loss:.2f} are"));
  }
  for (const auto& digits : {parts.str(1), parts.str(2), parts.str(4)}) {
    if (digits.empty() || whole_number<int>(digits).value_or(kWidest + 1) <= kWidest) continue;
    throw InvalidArgument(text("ModelCheckpoint: \"", spec, "\" in ", whole, " asks for ", digits, " digits; at most ",
                               kWidest, " are allowed"));
  }
}

// `value` in Python's format `spec`: a number such as 02d or .2f, or nothing.
std::string formatted(double value, const std::string& spec, const std::string& whole) {
  const bool integer = spec.empty() ? value == std::floor(value) : spec.back() == 'd';
  if (!spec.empty()) check_format(spec, whole);
  std::string pattern = "%" + spec;
  if (spec.empty()) pattern += integer ? "d" : "g";
  if (integer) pattern.insert(pattern.size() - 1, "ll");
  if (!std::isfinite(value)) return text(value);
  const auto print = [&](char* to, std::size_t size) {
    return integer ? std::snprintf(to, size, pattern.c_str(), std::llround(value))
                   : std::snprintf(to, size, pattern.c_str(), value);
  };
  std::string digits(static_cast<std::size_t>(print(nullptr, 0)), '\0');
  print(digits.data(), digits.size() + 1);
  return digits;
}

}  // namespace

std::string train::fill_in(const std::string& path, const std::function<double(const std::string& name)>& value_of) {
  std::string result;
  for (std::size_t at = 0; at < path.size(); ++at) {
    const auto end = path[at] == '{' ? path.find('}', at) : std::string::npos;
    if (end == std::string::npos) {
      result.push_back(path[at]);
      continue;
    }
    const auto inside = path.substr(at + 1, end - at - 1);
    const auto colon = inside.find(':');
    const auto name = inside.substr(0, colon);
    result += formatted(value_of(name), colon == std::string::npos ? "" : inside.substr(colon + 1), path);
    at = end;
  }
  return result;
}

std::string train::fixed_folder_of(const std::string& filepath) {
  const auto folder = std::filesystem::path(filepath.substr(0, filepath.find('{'))).parent_path();
  return folder.empty() ? "." : folder.string();
}

}  // namespace lockstep
