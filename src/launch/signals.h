// SIGINT, SIGTERM and SIGCHLD as something to poll.
#pragma once

#include <signal.h>

#include "base/file_descriptor.h"

namespace lockstep::launch {

// Blocks the signals and reads them from a descriptor; the destructor restores the signal mask.
class Signals {
 public:
  Signals();
  ~Signals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int descriptor() const { return socket_.get(); }

  // The next one that asks the job to end, or 0.
  int next() const;

 private:
  FileDescriptor socket_;
  sigset_t before_;
};

}  // namespace lockstep::launch
