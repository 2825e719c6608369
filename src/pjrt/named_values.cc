#include "pjrt/named_values.h"

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

}  // namespace

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
