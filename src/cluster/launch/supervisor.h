// Runs the processes of a job that are started on this host, until all have ended.
#pragma once

#include <string>
#include <vector>

#include "cluster/launch/end_policy.h"
#include "cluster/launch/job_store.h"
#include "cluster/launch/launcher_process.h"
#include "cluster/launch/other_launcher.h"
#include "cluster/launch/processes.h"

namespace lockstep::launch {

// Starts processes, passes on what users and the other launcher want, asks the policy what follows when one ends, and
// says how the job ended. For the main thread.
class Supervisor {
 public:
  // The rest of the job, and how long processes have from SIGTERM to SIGKILL. All of it outlives the Supervisor.
  struct Job {
    EndPolicy& policy;
    JobStore& store;
    double grace_seconds = 0;
    OtherLauncher* launcher = nullptr;  // on another host, which started this one
  };

  // Starts the members. Throws ClusterError and IoError; then none is left.
  Supervisor(std::vector<ChildCommand> members, const Job& job, const LauncherProcess& self);

  // Waits until all have ended and returns the exit status. kLogsIncomplete: all ended well, but a log was not written.
  static constexpr int kLogsIncomplete = 74;  // EX_IOERR of sysexits.h
  int run();

  // Prints that a signal asked the job to end, and returns the exit status.
  static int report_signal(int signal, std::ostream& err);

  bool failed() const { return first_ != nullptr; }
  bool was_asked_to_end() const { return asked_ != 0; }
  const Processes& processes() const { return processes_; }

 private:
  bool read_all();
  void note_report(const Child& child);
  void obey_launcher();
  void pass_on(int signal);
  void notice_ends();
  bool has_just_ended(Child& child);
  bool ended_well(const Child& child);
  bool goes_on_after(const Child& child);
  void start_again(const Child& child, const Verdict& verdict);
  void fail(const Child& child);
  void release_launchers();
  int status() const;

  const Job job_;
  const LauncherProcess self_;
  Processes processes_;
  int asked_ = 0;                     // the signal that asked the job to end
  const Child* first_ = nullptr;      // that failed
  std::string report_;                // its failure, as another host's launcher reported it
  const Child* last_lost_ = nullptr;  // without which the job went on
};

}  // namespace lockstep::launch
