#include "launch/reaper.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

[[noreturn]] void guard(int pipe) {
  setsid();  // not the terminal's: Ctrl-C is for the launcher
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) ::signal(signal, SIG_IGN);
  std::set<pid_t> groups;
  for (pid_t message = 0; read(pipe, &message, sizeof message) == sizeof message;) {
    if (message > 0) groups.insert(message);
    if (message < 0) groups.erase(-message);
  }
  for (const pid_t group : groups) kill(-group, SIGKILL);
  _exit(0);
}

}  // namespace

Reaper::Reaper() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw ClusterError(text("cannot make a pipe: ", std::strerror(errno)));
  const FileDescriptor in(ends[0]);
  pipe_ = FileDescriptor(ends[1]);
  process_ = fork();
  if (process_ < 0) throw ClusterError(text("cannot start a process: ", std::strerror(errno)));
  if (process_ > 0) return;
  close(ends[1]);
  guard(ends[0]);
}

Reaper::~Reaper() {
  pipe_ = FileDescriptor();
  waitpid(process_, nullptr, 0);
}

void Reaper::tell(pid_t message) const {
  while (write(pipe_.get(), &message, sizeof message) < 0 && errno == EINTR) {
  }
}

}  // namespace lockstep::launch
