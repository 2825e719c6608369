// A process of a job has ended: what now?
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster/launch/job_store.h"
#include "cluster/launch/processes.h"

namespace lockstep::launch {

// Says what becomes of a job whose member has failed.
struct Verdict {
  bool goes_on = false;           // without the member, or with another process in its place; else the job fails
  int restart = 0, restarts = 0;  // above 0: such a process is started, for that restart of so many
  bool joins = false;             // that process joins an elastic job
};

// Answers that question for one job. A member is a process of the job, or the launcher of another host, which runs a
// part of the job. The Supervisor asks, and does what the answer says. All calls come from its thread.
//
// By itself: one fails, all end, and all may be started again. For jobs whose processes all do one thing, and none of
// which can do without another.
class EndPolicy {
 public:
  virtual ~EndPolicy() = default;

  // The member has ended with another status than 0, and nothing had told the processes to end.
  virtual Verdict after_failure(const Processes& /*all*/, const Child& /*member*/) { return {}; }
  virtual void after_success(Processes& /*all*/, const Child& /*member*/) {}

  // Is called after each look at the processes, at least once a second, until they are to end. False: all members are
  // lost, and the job fails with the one that was lost last.
  virtual bool goes_on(Processes& /*all*/) { return true; }

  // The launcher that started this one is lost. False: the processes are killed.
  virtual bool goes_on_without_launcher(Processes& /*all*/) { return false; }

  // The job has failed: how many restarts it has used, where all of it may be started again; else nothing.
  virtual std::optional<int> restarts_before_new_start() const { return 0; }
};

// The chief, workers, servers and the evaluator of a job with parameter servers. Processes of each role are started
// again up to `restarts` times; the job goes on without a worker or an evaluator, and ends with its chief.
std::unique_ptr<EndPolicy> end_by_role(int restarts);

// Hosts that come and go while an elastic job runs on several. The names are those of their launchers.
class ChangingHosts {
 public:
  virtual ~ChangingHosts() = default;

  // The launchers of hosts that come, which are to be started.
  virtual std::vector<ChildCommand> newcomers(const Processes& all) = 0;
  virtual bool is_to_leave(const std::string& name) const = 0;

  // The host is lost. `found_nobody`: it did not fail, but its ranks found no member that they could join.
  virtual void lost(const std::string& name, bool found_nobody) = 0;
};

struct ElasticLimits {
  int restarts = 0;
  int fewest = 0;          // the job goes on while so many of the ranks that are started here are left
  bool is_a_part = false;  // other launchers run the rest of the job
};

// The job goes on without those that are lost, with others that are started in their place, and with newcomers, until
// nobody is left. `store` and `hosts` outlive it; null: hosts neither come nor go.
std::unique_ptr<EndPolicy> end_elastically(const ElasticLimits& limits, JobStore& store,
                                           ChangingHosts* hosts = nullptr);

}  // namespace lockstep::launch
