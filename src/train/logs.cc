#include "lockstep/train/logs.h"

#include <algorithm>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

[[noreturn]] void throw_unknown(const std::string& name, const auto& items) {
  throw InvalidArgument(text("there is no value \"", name, "\"; there are ", names_in(items)));
}

auto find(auto& items, const std::string& name) {
  return std::find_if(items.begin(), items.end(), [&](const auto& item) { return item.first == name; });
}

}  // namespace

double Logs::operator[](const std::string& name) const {
  const auto found = find(items_, name);
  if (found == items_.end()) throw_unknown(name, items_);
  return found->second;
}

bool Logs::contains(const std::string& name) const { return find(items_, name) != items_.end(); }

void Logs::set(const std::string& name, double value) {
  const auto found = find(items_, name);
  if (found == items_.end()) {
    items_.emplace_back(name, value);
  } else {
    found->second = value;
  }
}

const std::vector<double>& History::operator[](const std::string& name) const {
  const auto found = history.find(name);
  if (found == history.end()) throw_unknown(name, history);
  return found->second;
}

}  // namespace lockstep
