#include "launch/signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

namespace lockstep::launch {

Signals::Signals() {
  ::signal(SIGCHLD, SIG_DFL);  // where it is ignored there are no exit statuses
  ::signal(SIGPIPE, SIG_IGN);  // the reader of the output may go away, and the job goes on
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&set, signal);  // nohup ignores SIGHUP
  }
  pthread_sigmask(SIG_BLOCK, &set, &before_);
  socket_ = FileDescriptor(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
}

int Signals::next() const {
  signalfd_siginfo info;
  while (read(socket_.get(), &info, sizeof info) == sizeof info) {
    if (info.ssi_signo != SIGCHLD) return static_cast<int>(info.ssi_signo);
  }
  return 0;
}

}  // namespace lockstep::launch
