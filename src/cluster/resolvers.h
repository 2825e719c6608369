// One resolver a launcher, and what resolvers need: node lists, the process manager of MPICH, the end of an mpirun.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
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

inline constexpr int kMostRanks = 1'000'000;

// Returns how many processes there are of each type: "worker:4,ps:2,evaluator:1", and one chief; `size` in all. Throws
// ClusterError.
std::map<std::string, int> parse_roles(const std::string& list, int size);

// Returns a process's type, and its number within the type. Ranks are the chief, then the workers, the servers (ps) and
// the evaluator, as many as `tasks` says. Throws ClusterError where `tasks` has too few.
std::pair<std::string, int> role_of(int rank, const std::map<std::string, int>& tasks);

// Returns the cluster of TF_CONFIG's text. Throws ClusterError.
Cluster parse_tf_config(const std::string& json);

// The variable as a number from `least` to `most`. Throws ClusterError where it is not set or another thing.
int number_of(const Environment& environment, const char* name, int least, int most);

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
// The variable's text. The first is null, and the second throws ClusterError, where it is not set, or empty.
const char* value_of(const Environment& environment, const char* name);
std::string text_of(const Environment& environment, const char* name);

// Sets a World's host, and its place among the ranks of that host, by the hosts of all ranks.
void set_host(World& world, const std::vector<std::string>& hosts);

// The host of "host:port" or "[v6]:port". Throws ClusterError naming `field`.
std::string host_of(const std::string& address, const std::string& field);
bool is_host_and_port(const std::string& address);
int port_of(const std::string& address, const std::string& field);

// Slurm's node lists: "node[1-3,07],other".

// The nodes, in order. Throws ClusterError naming `variable` where the list is malformed, or has more than 100,000.
std::vector<std::string> expand_node_list(const std::string& list, const std::string& variable);

// Returns the tasks of each node, from "2(x3),1" (three nodes of two, one of one). Throws as expand_node_list does.
std::vector<int> expand_task_counts(const std::string& counts, const std::string& variable);

// The process manager of MPICH (hydra), which keeps keys and values for the ranks that it started. Speaks PMI-1's wire
// protocol, over the descriptor that hydra leaves in PMI_FD. Broadcasts rank 0's text to all ranks. Collective, once a
// process; later calls return that text. A process that exits normally tells the process manager so. Throws
// ClusterError, DeadlineExceeded.
std::string share_through_pmi(int fd, bool is_rank_0, const std::string& mine, Deadline deadline);

// Launchers whose death leaves their ranks alive. From now on this process ends soon after the mpirun that started it:
// SIGTERM, by which fit saves and ends, then SIGKILL ten seconds later. Does nothing where this process has no mpirun
// among its ancestors, or in a second call. Any thread.
void end_with_launcher();

}  // namespace lockstep::cluster
