// One attempt of a job: its processes are started together, watched, and ended together.
#pragma once

#include <chrono>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "launch/child.h"
#include "launch/control_protocol.h"
#include "launch/reaper.h"
#include "launch/signals.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launch {

class JobProcesses {
 public:
  // What it runs with. All of it must outlive this object.
  struct Context {
    const Signals& signals;
    const Reaper& reaper;
    std::ostream& out;
    std::ostream& err;
    ControlProtocol* control = nullptr;                   // where another launcher started this one
    std::function<void(int rank)> ended = {};             // a rank has, with status 0 or before the job had begun
    std::function<void(int process)> process_ended = {};  // one of this host's, however
    std::function<bool()> has_begun = {};                 // whether all ranks have found each other

    // Hosts that come while an elastic job runs: their launchers, and those that are to leave. Asked about once a
    // second.
    std::function<std::vector<ChildCommand>(const JobProcesses&)> more = {};
    std::function<bool(const std::string& name)> is_to_leave = {};

    // The job goes on without the member. `found_nobody`: it did not fail, but found no member that it could join.
    std::function<void(const std::string& name, bool found_nobody)> lost = {};

    // Whether the other launcher still holds the job's store, although its connection to this one broke.
    std::function<bool()> launcher_lives = {};

    // Returns why a process that came to an elastic job was not taken in (cluster::key_of_refusal); empty where it was
    // not refused.
    std::function<std::string(int rank, const std::string& restart)> refusal = {};

    // Returns true where the process is among the latest members of an elastic job, and where that is not known.
    // `joined_at_restart`: the LOCKSTEP_RESTART of a process that came later; empty for others.
    std::function<bool(int rank, const std::string& joined_at_restart)> is_member = {};

    // Whether an elastic training has ended without the process that began as `rank`.
    std::function<bool(int rank)> was_left_out = {};
  };

  struct Limits {
    double grace_seconds = 0;           // from SIGTERM to SIGKILL
    int restarts = 0;                   // how often processes of each role, or of an elastic job, are started again
    bool elastic = false;               // the job goes on without processes that fail once it has begun
    int fewest = 0;                     // likewise: while so many ranks are left here
    bool others_run_elsewhere = false;  // processes of the job, which other launchers have started
    double until_launcher_is_lost = 0;  // seconds from when its connection broke to when that can be known
    double longest_silence_seconds = kLongSilenceSeconds;  // of that launcher; then a job that is not elastic ends here
  };

  // Starts them. Throws ClusterError and IoError; then none is left.
  JobProcesses(std::vector<ChildCommand> members, const Limits& limits, const Context& context);

  // Ends those that still run.
  ~JobProcesses();

  // Waits until all have ended and returns the exit status. kLogsIncomplete: all ended well, but a log was not written.
  static constexpr int kLogsIncomplete = 74;  // EX_IOERR of sysexits.h
  int run();

  // For a job that a signal asked to end: tells that, and returns the exit status.
  static int report_signal(int signal, std::ostream& err);

  bool runs(const std::string& name) const;                                     // whether a member of that name does
  int ranks(const std::function<bool(const std::string& name)>& counts) const;  // of those members that run

  bool failed() const { return first_ != nullptr; }

  // True where the job failed because all members of an elastic job were lost: nobody could take in others. The second
  // function returns how many restarts had been used, without those of processes that were never taken in.
  bool nobody_is_left() const { return nobody_is_left_; }
  int restarts_used() const { return restarts_used_; }

  bool was_asked_to_end() const { return asked_ != 0; }

  // After run(): launchers on other hosts whose connection broke. Their ranks may still run.
  std::vector<ChildCommand> launchers_without_word() const;

 private:
  static constexpr const char *kReport = "lockstep run: ", *kNotice = "lockstep: ";  // kNotice: the job has not failed
  static constexpr std::chrono::seconds kAfterTheOthers{5};

  void start_all();
  void kill_all();
  bool running() const;
  void wait();
  void obey_launcher();
  bool read_all();
  bool read(Child& child);
  bool obey_part(Child& child, const std::string& line);
  bool reap(Child& child);
  void tell_of_log(const Child& child);
  void print(const Child& child, std::ostream& to, const std::string& line, bool is_replaced);
  void notice_ends();
  bool replace(std::size_t index);
  bool is_last_worker(std::size_t index) const;
  bool enough_are_left() const;
  bool joins(std::size_t index) const { return members_[index].environment.contains("LOCKSTEP_JOIN"); }
  std::string refusal(std::size_t index) const;
  bool begun() const { return context_.has_begun && context_.has_begun(); }
  bool is_member(std::size_t index) const;
  bool none_is_named() const;
  bool is_without_members() const;
  void find_nobody();
  void notice_nobody();
  void lose_launcher();
  void leave();
  void notice_those_left_out();
  void take_more();
  void fails_first(Child& child);
  void end_others();
  void pass_on(int signal);
  void set_out_to_kill();
  void kill_what_is_left();
  void release_launchers();
  std::string explanation(const Child& child) const;
  std::string end_of(const Child& child) const;

  std::vector<ChildCommand> members_;  // of children_, by index
  const Limits limits_;
  Context context_;
  const bool is_part_;  // of a job, of which other launchers run the rest
  std::vector<std::unique_ptr<Child>> children_;
  std::vector<std::unique_ptr<Child>> replaced_;  // whose places others have
  std::map<std::string, int> restarted_;          // [role]
  Child* last_lost_ = nullptr;                    // without which an elastic job went on
  const Child* first_ = nullptr;                  // that failed
  bool nobody_is_left_ = false;
  int restarts_used_ = 0;
  std::optional<Deadline> finds_nobody_by_;
  std::string report_;  // its failure, as another host's launcher reported it
  std::set<const Child*> without_log_;
  bool nobody_reads_ = false;
  bool ends_left_out_ = false;  // what still runs was left out by those that have ended
  Deadline looks_again_ = Deadline::after(std::chrono::seconds(0));  // for that
  bool shows_replaced_ = false;     // the cursor is at the beginning of a line that the next one replaces
  int asked_ = 0;                   // the signal that asked the job to end
  bool ending_ = false;             // members are being ended: how they end is no failure of theirs
  std::optional<Deadline> end_at_;  // after a member that ends the job has ended
  std::optional<Deadline> kill_at_;
  std::set<std::string> told_to_leave_;
  bool told_to_end_ = false;  // by the other launcher
  std::optional<Deadline> launcher_is_lost_at_;
  Deadline takes_more_ = Deadline::after(std::chrono::seconds(0));
  std::mutex adding_;           // to children_, which signs_of_life_ reads
  std::jthread signs_of_life_;  // last: it ends before the members do
};

}  // namespace lockstep::launch
