// The values that the chief's model has beside the servers' variables, as a worker gets them.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::parameter_server {

// Both numbers tell which values a worker has: a chief that was started again counts its changes anew.
struct ChiefState {
  std::int64_t chief = 0;    // the chief that has these values: Assignment's
  std::int64_t changes = 0;  // of the values in this fit: Assignment's `state`
  std::string values = {};   // frozen parameters, buffers and the seed (train/local_state.h)

  // Both numbers in a line, then the values. `parse` throws DataError for any other text.
  std::string print() const;
  static ChiefState parse(const std::string& printed);
};

}  // namespace lockstep::parameter_server
