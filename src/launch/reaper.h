// Makes sure that no process outlives the launcher, even if the launcher is killed.
#pragma once

#include <sys/types.h>

#include "base/file_descriptor.h"

namespace lockstep::launch {

// A separate process that knows the process groups that the launcher started. When the launcher has ended, for whatever
// reason, it kills those that are left.
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
