// The launcher's own process: the signals that it gets, the job's token in its memory, and a helper that ends the job's
// processes when the launcher is killed.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <iosfwd>
#include <string>

#include "base/file.h"
#include "lockstep/transport/access.h"

namespace lockstep::launch {

// Both ends, which no started process inherits. Throws ClusterError.
struct Pipe {
  Pipe();
  FileDescriptor out, in;
};

// SIGINT, SIGTERM, SIGHUP and SIGCHLD as something to poll. Blocks the signals and reads them from a descriptor; the
// destructor restores the signal mask.
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

// A separate process that knows the process groups that the launcher started. When the launcher has ended, for whatever
// reason, the reaper kills those that are left: no process outlives a launcher that is killed.
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

// The token of a job, where its processes can read it and nobody else.
class TokenFile {
 public:
  // Makes a memory file that other processes of this user can open while this object lives. It holds a new token, or
  // the one in these hexadecimal digits. Throws ClusterError.
  TokenFile();
  explicit TokenFile(const std::string& digits);

  const std::string& digits() const { return digits_; }
  const Access& access() const { return access_; }
  const std::string& path() const { return path_; }  // for LOCKSTEP_TOKEN_FILE

 private:
  std::string digits_;
  FileDescriptor memory_;
  std::string path_;
  Access access_;
};

// Every launcher has these. They outlive the objects that get this struct.
struct LauncherProcess {
  const Signals& signals;
  const Reaper& reaper;
  std::ostream& out;
  std::ostream& err;
};

}  // namespace lockstep::launch
