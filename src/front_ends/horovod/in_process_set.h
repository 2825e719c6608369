// While it lives, this thread's session is that of a process set.
#pragma once

#include <optional>
#include <string>

#include "front_ends/horovod/session.h"
#include "lockstep/horovod/process_set.h"

namespace lockstep::horovod {

struct InProcessSet {
 public:
  // Throws InvalidArgument where this rank is not included.
  explicit InProcessSet(const ProcessSet& set);

  // Returns the root's rank in the set. Throws InvalidArgument where the set lacks it.
  static int root_of(const std::string& caller, const ProcessSet& set, int root_rank);

 private:
  std::optional<Session::Use> use_;  // empty for all ranks
};

}  // namespace lockstep::horovod
