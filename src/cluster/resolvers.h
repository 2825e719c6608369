// One resolver a launcher.
#pragma once

#include <optional>
#include <string>

#include "lockstep/cluster/cluster.h"

namespace lockstep::cluster {

// Each returns nothing where its variables are not set. Throws ClusterError.
std::optional<Cluster> from_lockstep_run(const Environment& environment);
std::optional<Cluster> from_tf_config(const Environment& environment);
std::optional<Cluster> from_torchrun(const Environment& environment);
std::optional<Cluster> from_kubeflow(const Environment& environment);
std::optional<Cluster> from_open_mpi(const Environment& environment);
std::optional<Cluster> from_mpich(const Environment& environment);
std::optional<Cluster> from_slurm(const Environment& environment);
std::optional<Cluster> from_tpu(const Environment& environment);
std::optional<Cluster> from_indexed_job(const Environment& environment);
// `names`: those of all variables. Volcano's variables have the tasks' names in their own.
std::optional<Cluster> from_volcano(const Environment& environment, const std::vector<std::string>& names);

// True where Kubeflow's variables describe this process as the only one of its node: torchrun would have set others
// too.
bool is_kubeflow_node(const Environment& environment);

// The cluster of a process for which no resolver found anything. Throws ClusterError naming a variable that only a
// process of a job has.
Cluster alone(const Environment& environment);

inline constexpr std::int64_t kMostRanks = 1'000'000;

// Returns how many processes there are of each type: "worker:4,ps:2,evaluator:1", and one chief; `size` in all. Throws
// ClusterError.
std::map<std::string, int> parse_roles(const std::string& list, int size);

// Returns a process's type, and its number within the type. Ranks are the chief, then the workers, the servers (ps) and
// the evaluator, as many as `tasks` says. Throws ClusterError where `tasks` has too few.
std::pair<std::string, int> role_of(int rank, const std::map<std::string, int>& tasks);

// Returns the cluster of TF_CONFIG's text. Throws ClusterError.
Cluster parse_tf_config(const std::string& json);

// The variable as a number from `least` to `most`. Throws ClusterError where it is not set or another thing.
std::int64_t number_of(const Environment& environment, const char* name, std::int64_t least, std::int64_t most);

// The descriptor on which this process speaks with MPICH's process manager. Throws ClusterError.
int pmi_descriptor(const Environment& environment);

// The names of the variables from which world_of reads a World.
struct Names {
  const char* size;
  const char* rank;
  const char* local_size;
  const char* local_rank;
};
World world_of(const Environment& environment, const Names& names);
std::string text_of(const Environment& environment, const char* name);

// The host of "host:port" or "[v6]:port". Throws ClusterError naming `field`.
std::string host_of(const std::string& address, const std::string& field);
int port_of(const std::string& address, const std::string& field);

}  // namespace lockstep::cluster
