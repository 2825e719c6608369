// How the members of a new group exchange their addresses before they are connected.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::cluster {

// One member's end; one thread.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::int64_t generation() const = 0;

  // The rank by which errors name a member.
  virtual int name_of(int rank) const { return rank; }

  // Everybody's text, in the order of ranks. Collective. Throws DeadlineExceeded naming the members that did not come.
  virtual std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) = 0;
};

}  // namespace lockstep::cluster
