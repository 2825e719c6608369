// A process that takes part in a job, and what it prints: a rank, or the launcher of another host.
#pragma once

#include <signal.h>
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

  int ranks = 1;       // of the job, that it runs
  int first_rank = 0;  // likewise, of another host's launcher

  // When it ends with status 0 the job is over: the others end soon, or are ended.
  bool ends_job = false;

  bool is_elsewhere = false;  // it is reached over a network: its processes may live on when the connection breaks

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

  // Of another host's launcher: its ranks. It may live on for a while, since others need its host's store.
  bool ended() const { return ended_; }
  bool is_gone() const { return is_gone_; }
  int status() const { return status_; }  // the exit status, or 128 and the signal's number
  int signal() const { return signal_; }  // that ended it, or 0

  // By a signal, which an exception that nobody caught sends as well.
  bool was_killed() const { return signal_ != 0 && signal_ != SIGABRT; }

  // Why its log file is not whole; empty where it is.
  const std::string& log_problem() const { return log_problem_; }

  // Another host's launcher is there, and waits for leave to start its ranks, which it gets.
  void let_begin();

  // It has said that its ranks have ended. `lives_on`: to hold its host's store; else it is about to end.
  void report_end(int status, bool lives_on);

  // That launcher has said before that its ranks found no member of an elastic job.
  void report_nobody_is_left() { found_nobody_ = true; }
  bool found_nobody() const { return found_nobody_; }

  // After its end: it began ranks on another host and did not say that they have ended, so they may still run.
  bool ended_without_word() const { return is_elsewhere_ && has_begun_ && !ranks_have_ended_; }

  // Whether it has just ended. Where it is gone, the rest of its process group is killed; another process may get its
  // process id as soon as `before_its_number_is_free` has returned.
  bool reap(const std::function<void(pid_t)>& before_its_number_is_free);

  // Signals its process group. A child that reads the control protocol gets a message instead and signals its own
  // children.
  void send(int signal);

  // Ends it because another child has failed. As send(SIGTERM), but not as a request that the whole job should end.
  void end();

  // The ranks of another host's launcher leave an elastic job.
  void leave() { send_message(kLeave); }

  // Kills it at once. False for another host's launcher, which needs a moment to kill its ranks and to end; the next
  // call does not wait for it.
  bool kill();

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
  bool is_controlled_ = false, is_elsewhere_ = false;
  pid_t pid_ = 0;
  Mutex mutex_;
  FileDescriptor input_ LOCKSTEP_GUARDED_BY(mutex_);
  Channel streams_[2];
  FileDescriptor log_;
  std::string last_line_, last_error_;
  std::optional<int> reported_status_;
  bool ended_ = false, is_gone_ = false, found_nobody_ = false, has_begun_ = false, ranks_have_ended_ = false;
  int status_ = 0, signal_ = 0;
};

}  // namespace lockstep::launch
