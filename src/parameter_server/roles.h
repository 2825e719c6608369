// What each process of a job with parameter servers does.
#pragma once

#include <optional>
#include <string>

#include "lockstep/cluster/cluster.h"

namespace lockstep::parameter_server {

// chief: gives out steps, runs callbacks and evaluates. worker: computes steps. ps: owns shards and updates them.
// evaluator: evaluates checkpoints.
enum class Role { chief, worker, ps, evaluator };
const char* name_of(Role role);

struct Roles {
  Role mine = Role::chief;
  int index = 0;  // of this process among those of its role
  int workers = 0, servers = 0;
  bool evaluator = false;
};

// `cluster` as a World of all processes, whose store is the chief's or the launcher's: ranks are the chief, the
// workers, the servers, and the evaluator. Where the launcher gives processes no types, `servers` are the last ranks,
// and `evaluator` the very last. Throws ClusterError without a chief, a worker or a server, and InvalidArgument where
// `servers` contradicts the launcher.
Cluster with_roles(Cluster cluster, std::optional<int> servers, bool evaluator);

// Of a cluster that with_roles returned.
Roles roles_of(const Cluster& cluster);

}  // namespace lockstep::parameter_server
