// What GKE sets on the hosts of a TPU: https://cloud.google.com/kubernetes-engine/docs/concepts/tpus. libtpu reads the
// same variables.
#include <sstream>

#include "base/text.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"

namespace lockstep::cluster {

std::optional<Cluster> from_tpu(const Environment& environment) {
  const char* const set = environment("TPU_WORKER_HOSTNAMES");
  if (set == nullptr || *set == '\0') return std::nullopt;
  const std::string names = set;
  std::vector<std::string> hosts;
  std::istringstream list(names);
  for (std::string host; std::getline(list, host, ',');) hosts.push_back(host);
  if (hosts.size() == 1) return std::nullopt;
  for (const auto& host : hosts) {
    if (host.empty()) throw ClusterError(text("TPU_WORKER_HOSTNAMES is \"", names, "\": a host's name is empty"));
  }
  Cluster cluster{.source = "TPU_WORKER_HOSTNAMES"};
  auto& world = cluster.world;
  world.size = static_cast<int>(hosts.size());
  if (environment("TPU_WORKER_ID") == nullptr) {
    throw ClusterError(text("TPU_WORKER_HOSTNAMES names ", hosts.size(),
                            " hosts, and TPU_WORKER_ID, the place of this ", "one in that list (from 0), is not set"));
  }
  world.rank = static_cast<int>(number_of(environment, "TPU_WORKER_ID", 0, world.size - 1));
  world.host = hosts[static_cast<std::size_t>(world.rank)];
  cluster.store = hosts[0];
  cluster.job = text("TPU of ", names);
  cluster.holds_store = world.rank == 0;
  return cluster;
}

}  // namespace lockstep::cluster
