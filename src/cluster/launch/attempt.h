// One run of a job between restarts, with a token and a store of its own.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cluster/launch/end_policy.h"
#include "cluster/launch/host_part.h"
#include "cluster/launch/hosts.h"
#include "cluster/launch/launcher.h"
#include "cluster/launch/launcher_process.h"
#include "cluster/launch/supervisor.h"
#include "lockstep/cluster/store.h"

namespace lockstep::launch {

// Numbers the ranks of a job's hosts and tells how the hosts' launchers are started. The user named the hosts, or, with
// `discovery`, a program names them while the job runs.
class HostsOfJob : public ChangingHosts {
 public:
  // `part`: what the parts of all hosts have in common. `options` and `discovery` outlive this object.
  HostsOfJob(const LaunchOptions& options, const HostPart& part, const Store& store, HostDiscovery* discovery)
      : options_(options),
        part_(part),
        store_(store),
        discovery_(discovery),
        found_nobody_(options.blacklist_seconds) {}

  std::vector<ChildCommand> first_launchers(const std::vector<HostSlots>& hosts);

  // With `discovery`.
  std::vector<ChildCommand> newcomers(const Processes& all) override;
  bool is_to_leave(const std::string& name) const override { return !is_named(name) && enough_are_named(); }
  void lost(const std::string& name, bool found_nobody) override;

 private:
  ChildCommand launcher_of(const std::string& host, int count, int size, std::vector<std::string> stores);
  bool is_named(const std::string& name) const;
  bool enough_are_named() const;

  const LaunchOptions& options_;
  const HostPart part_;
  const Store store_;
  HostDiscovery* const discovery_;
  Blacklist found_nobody_;       // hosts whose ranks found no member to join; they may try again, in this job
  std::set<std::string> known_;  // hosts
  int ranks_ = 0;                // numbered so far
};

class Attempt {
 public:
  // Starts the job for the time `restart` + 1. `options` and `discovery` must outlive this object. `discovery`: null
  // where the hosts are those that the user named. Throws as Supervisor and Store.
  Attempt(const LaunchOptions& options, int restart, const LauncherProcess& self, HostDiscovery* discovery = nullptr);

  Supervisor& job() { return job_; }
  const EndPolicy& policy() const { return *policy_; }
  const Store& store() const { return store_; }

  // After the job: hosts whose connection broke, so that processes may still train there. In an elastic job these are
  // hosts of the latest members: others were left out by the members, and cannot train on.
  std::vector<std::string> hosts_that_may_train() const;

 private:
  std::vector<ChildCommand> ranks_here(const LaunchOptions& options) const;

  const TokenFile token_;
  const std::vector<HostSlots> hosts_;  // with which it begins; empty: this one
  const Store store_;
  const std::shared_ptr<void> presence_;  // in etcd
  const HostPart part_;                   // what the parts of all hosts have in common
  JobStore job_store_;
  HostsOfJob changing_hosts_;
  const std::unique_ptr<EndPolicy> policy_;
  Supervisor job_;
};

}  // namespace lockstep::launch
