// The processes that a launcher runs on its host: ranks, or the launchers of other hosts.
#pragma once

#include <chrono>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "cluster/launch/child.h"
#include "cluster/launch/launcher_process.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launch {

// Starts, reads, reaps and ends processes. Others decide who is started, and what an end means. For the main thread.
class Processes {
 public:
  Processes(const LauncherProcess& launcher, double grace_seconds)
      : launcher_(launcher), grace_seconds_(grace_seconds) {}
  ~Processes();  // kills those that still run
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  // These throw as Child; then nothing has changed. `replace` frees the child, which must have ended.
  void start(ChildCommand command);
  void replace(const Child& child, ChildCommand command);

  const std::vector<std::unique_ptr<Child>>& children() const { return children_; }
  bool are_running() const;  // one has not ended
  bool are_gone() const;     // all are

  // Waits at most a second for output, the time to kill, or a descriptor among `others`.
  void wait(std::initializer_list<int> others) const;

  // Print a bounded part of what is there, so that signals have their turn. False where there was nothing.
  bool read_all();
  bool read(Child& child);

  // True where it has just ended.
  bool reap(Child& child);

  // Prints a line about a job that goes on.
  void notice(const std::string& line) const;

  // Tells all to leave an elastic job.
  void leave();

  // Send all the signal; `end`: SIGTERM, since another process has failed. Those that are left after the grace time are
  // killed.
  void send(int signal);
  void end();
  void end_after(std::chrono::seconds time) { end_at_ = Deadline::after(time); }
  void kill();
  void end_those_whose_time_is_up();

  // True while processes are being ended: how they end is no failure of theirs.
  bool are_ending() const { return are_ending_; }

  bool logs_are_whole() const { return logs_are_whole_; }

 private:
  std::unique_ptr<Child> started(ChildCommand command);
  void print(const Child& child, std::ostream& to, const std::string& line, bool is_replaced);
  void kill_after_grace();

  // Tells the launcher, of another host, once a second that this one lives. In a thread: a slow reader of this
  // process's output may block the main thread.
  void show_life_to(Child& launcher);

  const LauncherProcess launcher_;
  const double grace_seconds_;
  std::vector<std::unique_ptr<Child>> children_;
  bool logs_are_whole_ = true;
  bool nobody_reads_ = false;
  bool shows_replaced_ = false;  // the cursor is at the beginning of a line that the next one replaces
  bool are_ending_ = false;
  std::optional<Deadline> end_at_, kill_at_;
  Mutex mutex_;
  std::vector<Child*> launchers_ LOCKSTEP_GUARDED_BY(mutex_);  // of other hosts
  std::jthread signs_of_life_;                                 // last: it ends before the children do
};

}  // namespace lockstep::launch
