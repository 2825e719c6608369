// The roles of the processes of a job with parameter servers.
#pragma once

#include <optional>

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

// Returns `cluster` as a World of all processes, whose store is the chief's or the launcher's. Ranks are the chief, the
// workers, the servers, and the evaluator. Where the launcher gives no types, `servers` are the last ranks, and
// `evaluator` the very last. Throws ClusterError without a chief, a worker or a server, and InvalidArgument where
// `servers` contradicts the launcher.
Cluster with_roles(Cluster cluster, std::optional<int> servers, bool evaluator);

// Returns the roles in a cluster that with_roles returned.
Roles roles_of(const Cluster& cluster);

// All processes but the chief; and those that use the servers' models.
inline int others_of(const Roles& roles) { return roles.workers + roles.servers + (roles.evaluator ? 1 : 0); }
inline int users_of_models(const Roles& roles) { return 1 + others_of(roles) - roles.servers; }

}  // namespace lockstep::parameter_server
