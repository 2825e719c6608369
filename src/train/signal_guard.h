// Records SIGINT and SIGTERM, which fit checks for between steps.
#pragma once

#include <csignal>

namespace lockstep::train {

// While one lives, the first SIGINT or SIGTERM is only noted; a second one ends the program. A signal that is ignored
// stays so. One at a time.
class SignalGuard {
 public:
  explicit SignalGuard(bool active);
  ~SignalGuard();
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;

  // The signal that came, or 0.
  int received() const;

  // For tests whose workers are threads: the signal that a guard in this thread has received, which is not active.
  static thread_local int of_thread;

 private:
  bool active_;
  struct sigaction before_interrupt_ {};
  struct sigaction before_terminate_ {};
};

}  // namespace lockstep::train
