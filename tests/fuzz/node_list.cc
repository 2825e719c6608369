// Slurm's lists of nodes and of tasks.
#include "cluster/resolvers.h"
#include "tests/fuzz/fuzz.h"

void lockstep::fuzz(const std::string& bytes) {
  if (bytes.empty()) return;
  if (bytes[0] % 2 == 0) {
    cluster::expand_node_list(bytes.substr(1), "NODES");
  } else {
    cluster::expand_task_counts(bytes.substr(1), "TASKS");
  }
}
