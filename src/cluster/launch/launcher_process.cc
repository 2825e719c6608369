#include "cluster/launch/launcher_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/connections.h"

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

Pipe::Pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw ClusterError(text("cannot make a pipe: ", std::strerror(errno)));
  out = FileDescriptor(ends[0]);
  in = FileDescriptor(ends[1]);
}

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

Reaper::Reaper() {
  Pipe pipe;
  process_ = fork();
  if (process_ < 0) throw ClusterError(text("cannot start a process: ", std::strerror(errno)));
  if (process_ == 0) {
    pipe.in = FileDescriptor();
    guard(pipe.out.get());
  }
  pipe_ = std::move(pipe.in);
}

Reaper::~Reaper() {
  pipe_ = FileDescriptor();
  waitpid(process_, nullptr, 0);
}

void Reaper::tell(pid_t message) const {
  while (write(pipe_.get(), &message, sizeof message) < 0 && errno == EINTR) {
  }
}

TokenFile::TokenFile() : TokenFile(transport::random_name() + transport::random_name()) {}

TokenFile::TokenFile(const std::string& digits)
    : digits_(digits), memory_(memfd_create("lockstep token", MFD_CLOEXEC)) {
  if (!memory_.open() || fchmod(memory_.get(), S_IRUSR) != 0 ||
      write(memory_.get(), digits.data(), digits.size()) != static_cast<ssize_t>(digits.size())) {
    throw ClusterError(text("cannot keep the job's token in memory: ", std::strerror(errno)));
  }
  path_ = text("/proc/", getpid(), "/fd/", memory_.get());
  access_ = access_of(
      [this](const char* name) { return std::strcmp(name, kTokenFileVariable) == 0 ? path_.c_str() : nullptr; });
}

}  // namespace lockstep::launch
