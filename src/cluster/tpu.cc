// Reads GKE's variables on the hosts of a TPU: https://cloud.google.com/kubernetes-engine/docs/concepts/tpus. libtpu
// reads these variables too.
#include <sstream>

#include "base/text.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"

namespace lockstep::cluster {

std::optional<Cluster> from_tpu(const Environment& environment) {
  if (const char* const slices = environment("MEGASCALE_NUM_SLICES"); slices != nullptr && whole_number(slices) != 1) {
    throw ClusterError(text("MEGASCALE_NUM_SLICES is \"", slices, "\": a job trains on one slice of TPUs; unset it ",
                            "where each slice is to train a model of its own"));
  }
  const char* const set = environment("TPU_WORKER_HOSTNAMES");
  const std::string names = set == nullptr ? "" : set;
  std::vector<std::string> hosts;
  std::istringstream list(names);
  for (std::string host; std::getline(list, host, ',');) hosts.push_back(host);
  if (hosts.size() <= 1) {
    const char* const id = value_of(environment, "TPU_WORKER_ID");
    if (id == nullptr || whole_number(id) == 0) return std::nullopt;
    throw ClusterError(text("TPU_WORKER_ID is \"", id, "\", and TPU_WORKER_HOSTNAMES is \"", names,
                            "\": it must name the hosts of all of the TPU's workers, with commas between them"));
  }
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
  world.rank = number_of(environment, "TPU_WORKER_ID", 0, world.size - 1);
  world.host = hosts[static_cast<std::size_t>(world.rank)];
  cluster.store = hosts[0];
  cluster.job = text("TPU of ", names);
  cluster.holds_store = world.rank == 0;
  return cluster;
}

}  // namespace lockstep::cluster
