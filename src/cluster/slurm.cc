// Reads srun's variables: https://slurm.schedmd.com/srun.html. In a batch script, outside of a step, none is set.
#include "base/text.h"
#include "cluster/node_list.h"
#include "cluster/resolvers.h"
#include "lockstep/base/error.h"

namespace lockstep::cluster {

std::optional<Cluster> from_slurm(const Environment& environment) {
  if (environment("SLURM_PROCID") == nullptr) return std::nullopt;
  if (environment("SLURM_STEP_NODELIST") == nullptr) {  // 0: a batch script
    if (number_of(environment, "SLURM_PROCID", 0, kMostRanks) == 0) return std::nullopt;
    throw ClusterError(
        text("SLURM_PROCID is \"", environment("SLURM_PROCID"),
             "\", and SLURM_STEP_NODELIST is not set: ", "start the program by srun, or unset SLURM_PROCID"));
  }
  Cluster cluster{.source = "Slurm"};
  auto& world = cluster.world;
  world.size = static_cast<int>(number_of(environment, "SLURM_STEP_NUM_TASKS", 1, kMostRanks));
  world.rank = static_cast<int>(number_of(environment, "SLURM_PROCID", 0, world.size - 1));
  const auto nodes = expand_node_list(text_of(environment, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST");
  const auto counts =
      expand_task_counts(text_of(environment, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_STEP_TASKS_PER_NODE");
  if (counts.size() != nodes.size()) {
    throw ClusterError(
        text("SLURM_STEP_TASKS_PER_NODE is of ", counts.size(), " nodes, SLURM_STEP_NODELIST of ", nodes.size()));
  }
  const auto node =
      static_cast<std::size_t>(number_of(environment, "SLURM_NODEID", 0, static_cast<std::int64_t>(nodes.size()) - 1));
  world.host = nodes[node];
  world.local_size = counts[node];
  world.local_rank = static_cast<int>(number_of(environment, "SLURM_LOCALID", 0, world.local_size - 1));
  if (world.size == 1) return cluster;
  cluster.store = nodes.size() == 1 ? "127.0.0.1" : nodes[0];
  cluster.job = text("Slurm ", text_of(environment, "SLURM_JOB_ID"), ".", text_of(environment, "SLURM_STEP_ID"));
  cluster.holds_store = world.rank == 0;
  return cluster;
}

}  // namespace lockstep::cluster
