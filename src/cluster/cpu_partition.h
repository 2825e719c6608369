// Divides a host's cores among the processes of a job.
#pragma once

#include <functional>
#include <vector>

#include "cluster/bootstrap.h"
#include "lockstep/cluster/world.h"

namespace lockstep::cluster {

// The cores that this process may use, and the number of those on which it can compute at once. They are its affinity
// mask at the first call, or its share after `keep_to_partition`. Pinning its threads later changes neither.
std::vector<int> given_cpus();
int kept_cpu_count();

// This process's share among the processes of one host that train together: an equal part of its GPUs and of its cores.
// Cores are not divided where the launcher gave each process its own.
struct CpuPartition {
  int rank = 0;
  int size = 1;
  bool own_cores = false;

  int usable_cpu_count() const;  // at least 1
  std::vector<int> cpus() const;
};

// Keeps the calling thread, and those that it starts later, on this process's share of the cores and GPUs that it had
// at its start.
void keep_to_partition(const CpuPartition& partition);

// Called at the end of each keep_to_partition, in its thread, with kept_cpu_count(): for modules that compute.
void after_partition(std::function<void(int cores)> act);

// True where the launcher gave this process cores that no other process of its host may use, as mpirun does. All
// members call it.
bool has_own_cores(const World& world, Bootstrap& members, Deadline deadline);

}  // namespace lockstep::cluster
