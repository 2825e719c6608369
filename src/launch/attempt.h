// One run of a job between restarts, with a token and a store of its own.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "launch/host_discovery.h"
#include "launch/host_part.h"
#include "launch/launcher.h"
#include "launch/processes.h"
#include "launch/token_file.h"
#include "lockstep/cluster/store.h"

namespace lockstep::launch {

class Attempt {
 public:
  // Starts the job for the time `restart` + 1. `options` and `discovery` must outlive this object. `discovery`: null
  // where the hosts are those that the user named. Throws as JobProcesses and Store.
  Attempt(const LaunchOptions& options, int restart, const JobProcesses::Context& context,
          HostDiscovery* discovery = nullptr);

  JobProcesses& job() { return job_; }
  const Store& store() const { return store_; }

  // After the job: hosts whose connection broke, so that processes may still train there. Of an elastic job these are
  // hosts of the latest members: others were left out by the members, and cannot train on.
  std::vector<std::string> hosts_that_may_train() const;

 private:
  JobProcesses::Context watched(JobProcesses::Context context);
  void leave_out(const std::string& name, bool found_nobody);
  std::vector<ChildCommand> hosts_that_came(const JobProcesses& job);
  bool is_named(const std::string& name) const;
  bool enough_are_named() const;
  Store make_store();
  Access access() const { return {token_.access().token, options_.trusted_network}; }
  HostPart part_of_job() const;
  std::vector<ChildCommand> members();

  const LaunchOptions& options_;
  const int restart_;
  HostDiscovery* const discovery_;
  Blacklist found_nobody_;       // hosts whose processes found no member to join: for another try, not for another job
  std::set<std::string> known_;  // hosts
  int ranks_ = 0;                // numbered so far
  const TokenFile token_;
  const std::vector<HostSlots> hosts_;
  std::shared_ptr<void> presence_;  // in etcd
  const Store store_;
  JobProcesses job_;
};

}  // namespace lockstep::launch
