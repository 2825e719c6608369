// A process that takes part in a job, and what it prints: a rank, or the launcher of another host.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/mutex.h"

namespace lockstep::launch {

// Splits a stream of bytes into lines. The last line may lack its end. A line longer than `longest` comes in pieces.
// With `redraws`, text that ends with a carriage return is a line too, which the next one replaces on the screen.
class Lines {
 public:
  explicit Lines(bool redraws = false, std::size_t longest = 64 * 1024) : redraws_(redraws), longest_(longest) {}

  using Take = std::function<void(const std::string& line, bool is_replaced)>;
  void add(const char* bytes, std::size_t count, const Take& take) {
    for (std::size_t i = 0; i < count; ++i) {
      const bool returns = redraws_ && bytes[i] == '\r' && !(i + 1 < count && bytes[i + 1] == '\n');
      const bool ends = returns || bytes[i] == '\n';
      if (!ends) begun_.push_back(bytes[i]);
      if (!ends && begun_.size() < longest_) continue;
      take(begun_, returns);
      begun_.clear();
    }
  }
  void finish(const Take& take) {
    if (!begun_.empty()) take(begun_, false);
    begun_.clear();
  }

 private:
  bool redraws_;
  std::size_t longest_;
  std::string begun_;
};

inline constexpr const char* kReport = "lockstep run: ";  // how a launcher's lines about a failure begin

struct ChildCommand {
  std::string name;    // "rank 3"
  int rank = -1;       // of the job; of another host's launcher none
  std::string prefix;  // of each line that it prints
  std::vector<std::string> command;
  std::map<std::string, std::string> environment;  // added to this process's
  std::string log_file;                            // empty: none
  bool redraws = false;                            // its output ends on a terminal, where it may redraw a line

  // In a job with parameter servers. A dispensable process is started again also where no signal ended it, and the job
  // may go on without it.
  std::string role = {};
  bool dispensable = false;

  int ranks = 1;       // how many of the job's ranks it runs
  int first_rank = 0;  // the first one that another host's launcher runs

  // When it ends with status 0 the job is over: the others end soon, or are ended.
  bool ends_job = false;

  bool is_elsewhere = false;  // it is reached over a network: its processes may live on when the connection breaks

  // The launcher of another host, which an elastic job needs until its end. The launcher holds that host's store when
  // its ranks have ended. Its report of their failure does not end the job.
  bool holds_store = false;

  // The first bytes of its standard input: it is the launcher of another host. The input then stays open and carries
  // the messages of cluster/launch/other_launcher.h, which replace signals.
  std::optional<std::string> input = {};
};

class Child {
 public:
  enum class Stream { out, error };

  // Starts it in a process group of its own. The system kills it when the calling thread ends. Throws ClusterError
  // where the program cannot be started.
  explicit Child(ChildCommand command);

  const ChildCommand& command() const { return command_; }
  const std::string& name() const { return command_.name; }
  int rank() const { return command_.rank; }
  bool is_launcher() const { return command_.input.has_value(); }  // of another host
  pid_t pid() const { return pid_; }

  // To be polled for reading; -1 once the stream has ended.
  int descriptor(Stream stream) const { return streams_[static_cast<int>(stream)].socket.get(); }

  // Reads some of what is there. Lines go into the log file, and to `print` but for another launcher's messages. False
  // where there was nothing.
  bool read(Stream stream, const Lines::Take& print);

  // True where its ranks have ended. Another host's launcher may live on, since others need its host's store.
  bool ended() const { return ended_; }
  bool is_gone() const { return is_gone_; }
  int status() const { return status_; }  // the exit status, or 128 and the signal's number
  int signal() const { return signal_; }  // that ended it, or 0

  // True where a signal ended it, other than that of an exception that nobody caught.
  bool was_killed() const { return signal_ != 0 && signal_ != SIGABRT; }

  // After its end: "rank 3 ended with status 1: ", and the last line that it wrote to stderr, or else to stdout.
  std::string how_it_ended() const;

  // Returns why its log file is not whole, when asked for the first time; else empty.
  std::string take_log_problem() { return std::exchange(log_problem_, {}); }

  // True where another host's launcher has said that its ranks found no member of an elastic job.
  bool found_nobody() const { return found_nobody_; }

  // The line in which another host's launcher named the first failure among its ranks. Empty where it named none, and
  // for one that `holds_store`.
  const std::string& report() const { return report_; }

  // After its end: true where it began ranks on another host and did not say that they have ended; they may still run.
  bool ended_without_word() const { return command_.is_elsewhere && has_begun_ && !ranks_have_ended_; }

  // True where it has just ended. Where it is gone, the rest of its process group is killed. Another process may get
  // its number as soon as `before_its_number_is_free` has returned.
  bool reap(const std::function<void(pid_t)>& before_its_number_is_free);

  // Signals its process group. Another host's launcher gets a message instead, and signals its own children.
  void send(int signal);

  // Ends it because another child has failed. As send(SIGTERM), but not as a request that the whole job should end.
  void end();

  // It, or each rank of another host's launcher, leaves an elastic job after its step, however long that takes.
  void leave();
  bool was_told_to_leave() const { return was_told_to_leave_; }

  // Kills it at once. False for another host's launcher, which needs a moment to kill its ranks and to end; the next
  // call does not wait for it.
  bool kill();

  // Tells another host's launcher that this one lives. Any thread.
  void reassure();

 private:
  struct Channel {
    FileDescriptor socket;
    Lines lines;
  };

  bool obey(const std::string& line);
  void send_message(const std::string& line);

  const ChildCommand command_;
  pid_t pid_ = 0;
  Mutex mutex_;
  FileDescriptor input_ LOCKSTEP_GUARDED_BY(mutex_);
  Channel streams_[2];
  FileDescriptor log_;
  std::string log_problem_, last_line_, last_error_;
  bool is_to_end_ = false, was_told_to_leave_ = false;
  bool ended_ = false, is_gone_ = false;
  int status_ = 0, signal_ = 0;

  // Said by another host's launcher.
  bool has_begun_ = false, found_nobody_ = false, ranks_have_ended_ = false;
  std::optional<int> reported_status_;
  std::string report_;
};

}  // namespace lockstep::launch
