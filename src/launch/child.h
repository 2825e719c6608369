// A process that takes part in a job, and what it prints: a rank, or the launcher of another host.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "launch/control_protocol.h"
#include "launch/lines.h"

namespace lockstep::launch {

struct ChildCommand {
  std::string name;    // "rank 3"
  int rank = -1;       // of the job; of another host's launcher none
  std::string prefix;  // of each line that it prints
  std::vector<std::string> command;
  std::map<std::string, std::string> environment;  // added to this process's
  std::string log_file;                            // empty: none
  bool redraws = false;                            // its output ends on a terminal, where it may redraw a line

  // Not empty: when a signal ends this process it is started again, as often as the processes of this role may be in
  // all, with LOCKSTEP_RESTART one higher.
  std::string role = {};
  bool dispensable = false;  // the same when it fails; when it may not be started again, the job goes on without it

  int ranks = 1;  // of the job that it runs

  // When it ends with status 0 the job is over: the others end soon, or are ended.
  bool ends_job = false;

  // The first bytes of its standard input. The input then stays open and carries the messages of
  // launch/control_protocol.h, which replace signals.
  std::optional<std::string> input;
};

class Child {
 public:
  enum class Stream { out, error };

  // Starts it in a process group of its own. The system kills it when the calling thread ends. Throws ClusterError
  // where the program cannot be started.
  explicit Child(const ChildCommand& command);

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  const std::string& prefix() const { return prefix_; }
  bool is_controlled() const { return is_controlled_; }
  pid_t pid() const { return pid_; }

  // What to poll for reading; -1 once the stream has ended.
  int descriptor(Stream stream) const { return streams_[static_cast<int>(stream)].socket.get(); }

  // Reads some of what is there: lines into the log file and to `print`. False where there was nothing.
  bool read(Stream stream, const Lines::Take& print);

  // After its end: the last line that it wrote to stderr, else the last one to stdout; empty where it wrote nothing.
  const std::string& last_line_written() const { return last_error_.empty() ? last_line_ : last_error_; }

  bool ended() const { return ended_; }
  int status() const { return status_; }  // the exit status, or 128 and the signal's number
  int signal() const { return signal_; }  // that ended it, or 0

  // Why its log file is not whole; empty where it is.
  const std::string& log_problem() const { return log_problem_; }

  // Whether it has just ended; the rest of its process group is then killed. Another process may get its process id as
  // soon as `before_its_number_is_free` has returned.
  bool reap(const std::function<void(pid_t)>& before_its_number_is_free);

  // Signals its process group. A child that reads the control protocol gets a message instead and signals its own
  // children.
  void send(int signal);

  // Ends it because another child has failed. As send(SIGTERM), but not as a request that the whole job should end.
  void end();

  // Kills it at once, without reading its remaining output.
  void kill();

  // Tells one that reads the control protocol that the launcher lives. Any thread.
  void reassure() { send_message(kAlive); }

 private:
  struct Channel {
    FileDescriptor socket;
    Lines lines;
  };

  void send_message(const std::string& line);

  std::string name_, prefix_, log_file_, log_problem_;
  int rank_ = -1;
  bool is_controlled_ = false;
  pid_t pid_ = 0;
  Mutex mutex_;
  FileDescriptor input_ LOCKSTEP_GUARDED_BY(mutex_);
  Channel streams_[2];
  FileDescriptor log_;
  std::string last_line_, last_error_;
  bool ended_ = false;
  int status_ = 0, signal_ = 0;
};

}  // namespace lockstep::launch
