// Sees to it that nothing outlives the launcher, even if that is killed.
#pragma once

#include <sys/types.h>

#include "base/file_descriptor.h"

namespace lockstep::launch {

// A process of its own that knows the groups of processes which the launcher started. When the launcher is gone,
// however it ended, it kills those that are left.
class Reaper {
 public:
  // Forks: before the process has other threads. Throws ClusterError.
  Reaper();
  ~Reaper();  // waits for it
  Reaper(const Reaper&) = delete;
  Reaper& operator=(const Reaper&) = delete;

  void watch(pid_t group) const { tell(group); }
  void forget(pid_t group) const { tell(-group); }

 private:
  void tell(pid_t message) const;

  FileDescriptor pipe_;
  pid_t process_ = 0;
};

}  // namespace lockstep::launch
