#include "parameter_server/roles.h"

#include <tuple>

#include "base/text.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {
namespace {

constexpr const char* kNames[] = {"chief", "worker", "ps", "evaluator"};

int count_of(const Cluster& cluster, Role role) {
  const auto found = cluster.tasks.find(name_of(role));
  return found == cluster.tasks.end() ? 0 : found->second;
}

// TF_CONFIG's World is that of the chief and the workers; this one has all processes.
void take_all_of_tf_config(Cluster& cluster) {
  std::vector<std::string> hosts;
  for (const char* const type : kNames) {
    for (const auto& address : cluster.jobs[type]) hosts.push_back(cluster::host_of(address, "TF_CONFIG"));
  }
  auto& world = cluster.world;
  world.size = static_cast<int>(hosts.size());
  world.rank = cluster.task_index;
  for (const char* const type : kNames) {
    if (type == cluster.task_type) break;
    world.rank += static_cast<int>(cluster.jobs[type].size());
  }
  cluster::set_host(world, hosts);
  if (cluster.jobs["chief"].empty()) return;
  cluster.store = cluster.jobs["chief"][0];
  cluster.holds_store = world.rank == 0;
}

void check(const Cluster& cluster) {
  const auto name = cluster.source.empty() ? std::string("this process is alone") : cluster.source;
  for (const auto role : {Role::chief, Role::worker, Role::ps}) {
    if (count_of(cluster, role) > 0) continue;
    throw ClusterError(text(
        "ParameterServerStrategy: there is no ", name_of(role), " in the cluster (", name,
        "); start the program by lockstep run --workers 2 --ps 1, or with a TF_CONFIG of a chief, workers and ps"));
  }
}

}  // namespace

const char* name_of(Role role) { return kNames[static_cast<int>(role)]; }

Cluster with_roles(Cluster cluster, std::optional<int> servers, bool evaluator) {
  if (!cluster.tasks.empty()) {
    if (servers && *servers != count_of(cluster, Role::ps)) {
      throw InvalidArgument(text("ParameterServerStrategy: num_ps is ", *servers, ", and ", cluster.source, " has ",
                                 count_of(cluster, Role::ps)));
    }
    if (cluster.source == "TF_CONFIG") take_all_of_tf_config(cluster);
  } else {
    const int ps = servers.value_or(0), others = 1 + ps + (evaluator ? 1 : 0);
    if (ps < 0) throw InvalidArgument(text("ParameterServerStrategy: num_ps is ", ps, "; it must be 1 or more"));
    cluster.tasks = {{"chief", 1}, {"ps", ps}, {"evaluator", evaluator ? 1 : 0}};
    cluster.tasks["worker"] = std::max(0, cluster.world.size - others);
    if (cluster.tasks["worker"] == 0 && ps > 0) {
      throw ClusterError(text("ParameterServerStrategy: ", cluster.source, " has ", cluster.world.size,
                              " processes; num_ps = ", ps, evaluator ? ", an evaluator," : "",
                              " and the chief leave none for workers: start at least ", others + 1));
    }
  }
  check(cluster);
  std::tie(cluster.task_type, cluster.task_index) = cluster::role_of(cluster.world.rank, cluster.tasks);
  return cluster;
}

Roles roles_of(const Cluster& cluster) {
  Roles roles{.index = cluster.task_index,
              .workers = count_of(cluster, Role::worker),
              .servers = count_of(cluster, Role::ps),
              .evaluator = count_of(cluster, Role::evaluator) > 0};
  for (const auto role : {Role::chief, Role::worker, Role::ps, Role::evaluator}) {
    if (cluster.task_type == name_of(role)) roles.mine = role;
  }
  return roles;
}

}  // namespace lockstep::parameter_server
