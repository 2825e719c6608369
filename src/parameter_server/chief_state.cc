#include "parameter_server/chief_state.h"

#include <sstream>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {

std::string ChiefState::print() const { return text(chief, " ", changes, "\n", values); }

ChiefState ChiefState::parse(const std::string& printed) {
  ChiefState state;
  const auto end = printed.find('\n');
  std::istringstream numbers(printed.substr(0, end));
  if (end == std::string::npos || !(numbers >> state.chief >> state.changes) || !(numbers >> std::ws).eof())
    throw DataError("the chief's state does not begin with the numbers of a chief and of its changes");
  state.values = printed.substr(end + 1);
  return state;
}

}  // namespace lockstep::parameter_server
