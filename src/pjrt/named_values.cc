#include "pjrt/named_values.h"

#include <charconv>
#include <cstdlib>
#include <sstream>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::pjrt {
namespace {

struct SetValue {
  PJRT_NamedValue& to;

  void operator()(const std::string& value) const {
    to.type = PJRT_NamedValue_kString;
    to.string_value = value.c_str();
    to.value_size = value.size();
  }
  void operator()(std::int64_t value) const {
    to.type = PJRT_NamedValue_kInt64;
    to.int64_value = value;
  }
  void operator()(bool value) const {
    to.type = PJRT_NamedValue_kBool;
    to.bool_value = value;
  }
  void operator()(float value) const {
    to.type = PJRT_NamedValue_kFloat;
    to.float_value = value;
  }
};

Options::value_type option_in(const std::string& item) {
  const auto equals = item.find('=');
  if (equals == 0 || equals == std::string::npos)
    throw InvalidArgument(text("PJRT_PLUGIN_OPTIONS: \"", item, "\" is not name=value, such as cpu_device_count=8"));
  const auto name = item.substr(0, equals), value = item.substr(equals + 1);
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error == std::errc() && end == value.data() + value.size()) return {name, number};
  if (value == "true" || value == "false") return {name, value == "true"};
  return {name, value};
}

}  // namespace

Options plugin_options(const Options& asked) {
  const char* const set = std::getenv("PJRT_PLUGIN_OPTIONS");
  if (!asked.empty() || set == nullptr) return asked;
  Options options;
  std::istringstream items(set);
  for (std::string item; std::getline(items, item, ',');) options.push_back(option_in(item));
  return options;
}

std::vector<PJRT_NamedValue> named_values(const Options& options) {
  std::vector<PJRT_NamedValue> values;
  for (const auto& [name, value] : options) {
    values.push_back({.struct_size = PJRT_NamedValue_STRUCT_SIZE, .name = name.c_str(), .name_size = name.size()});
    values.back().value_size = 1;
    std::visit(SetValue{values.back()}, value);
  }
  return values;
}

}  // namespace lockstep::pjrt
