// Sees to it that nothing outlives the launcher, even if that is killed.
#pragma once

#include <sys/types.h>

#include "base/file_descriptor.h"

namespace lockstep {

// A process of its own that knows the groups of processes which the launcher started. When the launcher is gone,
// however it ended, it kills those that are left.
class Guardian {
 public:
  // Forks: before the process has other threads. Throws ClusterError.
  Guardian();
  ~Guardian();  // waits for it
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  void watch(pid_t group) const { tell(group); }
  void forget(pid_t group) const { tell(-group); }

 private:
  void tell(pid_t message) const;

  FileDescriptor pipe_;
  pid_t process_ = 0;
};

}  // namespace lockstep
