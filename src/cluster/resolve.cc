#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <tuple>

#include "base/log.h"
#include "base/text.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"

namespace lockstep::cluster {
const char* value_of(const Environment& environment, const char* name) {
  const char* const value = environment(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

std::string text_of(const Environment& environment, const char* name) {
  const char* const value = value_of(environment, name);
  if (value == nullptr) throw ClusterError(text(name, " is not set"));
  return value;
}

int number_of(const Environment& environment, const char* name, int least, int most) {
  const auto value = text_of(environment, name);
  const auto number = whole_number<int>(value);
  if (number && *number >= least && *number <= most) return *number;
  throw ClusterError(text(name, " is \"", value, "\"; it must be a number from ", least, " to ", most));
}

World world_of(const Environment& environment, const Names& names) {
  const auto number = [&](const char* name, int least, int most) { return number_of(environment, name, least, most); };
  World world;
  world.size = number(names.size, 1, kMostRanks);
  world.rank = number(names.rank, 0, world.size - 1);
  world.local_size = number(names.local_size, 1, world.size);
  world.local_rank = number(names.local_rank, 0, world.local_size - 1);
  return world;
}

void set_host(World& world, const std::vector<std::string>& hosts) {
  world.host = hosts[static_cast<std::size_t>(world.rank)];
  const auto rank = hosts.begin() + world.rank;
  world.local_rank = static_cast<int>(std::count(hosts.begin(), rank, world.host));
  world.local_size = world.local_rank + static_cast<int>(std::count(rank, hosts.end(), world.host));
}

bool is_host_and_port(const std::string& address) {
  const auto colon = address.rfind(':');
  const auto port = colon == std::string::npos ? std::nullopt : whole_number(address.substr(colon + 1));
  return colon != 0 && port && *port >= 1 && *port <= 65535;
}

std::string host_of(const std::string& address, const std::string& field) {
  if (!is_host_and_port(address)) {
    throw ClusterError(text(field, " is \"", address, "\"; it must be host:port, with a port from 1 to 65535"));
  }
  const auto host = address.substr(0, address.rfind(':'));
  return host.front() == '[' && host.back() == ']' ? host.substr(1, host.size() - 2) : host;
}

int port_of(const std::string& address, const std::string& field) {
  host_of(address, field);  // throws where either is malformed
  return whole_number<int>(address.substr(address.rfind(':') + 1)).value();
}

std::map<std::string, int> parse_roles(const std::string& list, int size) {
  const auto fail = [&](const std::string& why) {
    throw ClusterError(text("LOCKSTEP_ROLES is \"", list, "\": ", why));
  };
  std::map<std::string, int> tasks{{"chief", 1}};
  int all = 1;
  std::istringstream entries(list);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto colon = entry.find(':');
    const auto type = entry.substr(0, colon);
    const auto count = colon == std::string::npos ? std::nullopt : whole_number<int>(entry.substr(colon + 1));
    if (type != "worker" && type != "ps" && type != "evaluator") fail("there are worker, ps and evaluator");
    if (!count || *count < 1 || *count > kMostRanks)
      fail(text("\"", entry, "\" is no type and number, as in worker:4"));
    if (!tasks.emplace(type, *count).second) fail(text(type, " comes twice"));
    all += *count;
  }
  if (all != size) fail(text("with the chief these are ", all, " processes, and LOCKSTEP_SIZE is ", size));
  return tasks;
}

std::pair<std::string, int> role_of(int rank, const std::map<std::string, int>& tasks) {
  int first = 0;
  for (const char* const type : {"chief", "worker", "ps", "evaluator"}) {
    const auto found = tasks.find(type);
    const int count = found == tasks.end() ? 0 : found->second;
    if (rank < first + count) return {type, rank - first};
    first += count;
  }
  throw ClusterError(text("rank ", rank, " has no role: there are ", first, " processes with one"));
}

std::optional<Cluster> from_lockstep_run(const Environment& environment) {
  if (environment("LOCKSTEP_RANK") == nullptr) return std::nullopt;
  const Names names{"LOCKSTEP_SIZE", "LOCKSTEP_RANK", "LOCKSTEP_LOCAL_SIZE", "LOCKSTEP_LOCAL_RANK"};
  Cluster cluster{.world = world_of(environment, names), .source = "lockstep run"};
  cluster.world.host = text_of(environment, "LOCKSTEP_HOST");
  cluster.store = text_of(environment, "LOCKSTEP_STORE");
  cluster.joins = environment("LOCKSTEP_JOIN") != nullptr && number_of(environment, "LOCKSTEP_JOIN", 0, 1) == 1;
  if (environment("LOCKSTEP_HOST_STORE") != nullptr) {
    cluster.host_store = text_of(environment, "LOCKSTEP_HOST_STORE");
    if (cluster.joins) cluster.store = cluster.host_store;  // the other may be lost
  }
  if (environment("LOCKSTEP_ROLES") != nullptr) {
    cluster.tasks = parse_roles(text_of(environment, "LOCKSTEP_ROLES"), cluster.world.size);
    std::tie(cluster.task_type, cluster.task_index) = role_of(cluster.world.rank, cluster.tasks);
  }
  return cluster;
}

std::optional<Cluster> from_torchrun(const Environment& environment) {
  if (environment("RANK") == nullptr || environment("WORLD_SIZE") == nullptr) return std::nullopt;
  if (is_kubeflow_node(environment)) return std::nullopt;  // RANK is the node's
  Cluster cluster{.source = "torchrun"};
  auto& world = cluster.world;
  world.size = number_of(environment, "WORLD_SIZE", 1, kMostRanks);
  world.rank = number_of(environment, "RANK", 0, world.size - 1);
  const auto optional = [&](const char* name, int otherwise) {
    return environment(name) == nullptr ? otherwise : number_of(environment, name, 0, kMostRanks);
  };
  if (environment("LOCAL_RANK") != nullptr) {
    world.local_size = number_of(environment, "LOCAL_WORLD_SIZE", 1, world.size);
    world.local_rank = number_of(environment, "LOCAL_RANK", 0, world.local_size - 1);
  }
  if (world.size == 1 && environment("MASTER_ADDR") == nullptr) return cluster;
  const auto master = text_of(environment, "MASTER_ADDR");
  const auto port = number_of(environment, "MASTER_PORT", 1, 65535);
  world.host = world.local_size == world.size ? "localhost" : text("node ", optional("GROUP_RANK", world.rank));
  // torchrun itself answers at the master's port; others leave it to rank 0.
  if (environment("TORCHELASTIC_RUN_ID") == nullptr) {
    cluster.store = text(master, ":", port);
  } else {
    cluster.store = world.local_size == world.size ? "127.0.0.1" : master;
    cluster.job = text("torchrun ", text_of(environment, "TORCHELASTIC_RUN_ID"), " at ", master, ":", port,
                       ", restart ", optional("TORCHELASTIC_RESTART_COUNT", 0));
  }
  cluster.holds_store = world.rank == 0;
  return cluster;
}

}  // namespace lockstep::cluster

namespace lockstep {
namespace {

std::string describe(const Cluster& cluster) {
  return text(cluster.source, " says rank ", cluster.world.rank, " of ", cluster.world.size);
}

// The variables of schedulers describe machines and not the processes on them, so a launcher's count before them. Under
// Slurm, for example, mpirun starts its own daemons as the tasks of a step.
std::optional<Cluster> from_scheduler(const Environment& environment, const std::vector<std::string>& names) {
  for (const auto resolver : {cluster::from_slurm, cluster::from_tpu}) {
    if (auto found = resolver(environment)) return found;
  }
  if (auto found = cluster::from_volcano(environment, names)) return found;
  return cluster::from_indexed_job(environment);
}

}  // namespace

Cluster resolve_cluster(const Environment& environment, const std::vector<std::string>& names) {
  std::optional<Cluster> found;
  for (const auto resolver : {cluster::from_lockstep_run, cluster::from_tf_config, cluster::from_torchrun,
                              cluster::from_kubeflow, cluster::from_open_mpi, cluster::from_mpich}) {
    const auto other = resolver(environment);
    if (!other) continue;
    if (found && (found->world.rank != other->world.rank || found->world.size != other->world.size)) {
      throw ClusterError(text(describe(*found), ", and ", describe(*other), "; unset the variables of one"));
    }
    if (!found) found = other;
  }
  if (!found) found = from_scheduler(environment, names);
  return found ? *found : cluster::alone(environment);
}

Cluster resolve_cluster() {
  std::vector<std::string> names;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    names.push_back(std::string(*variable).substr(0, std::string_view(*variable).find('=')));
  }
  const auto cluster = resolve_cluster([](const char* name) { return std::getenv(name); }, names);
  static std::once_flag warned;
  if (!cluster.warning.empty()) std::call_once(warned, [&] { log_warning(cluster.warning); });
  return cluster;
}

}  // namespace lockstep
