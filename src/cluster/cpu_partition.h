// Divides a host's cores among the processes of a job.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cluster/bootstrap.h"
#include "lockstep/cluster/world.h"

namespace lockstep::cluster {

// The cores that this process may use: its affinity mask when it first asked, or its share after `keep_to_partition`;
// and on how many of them it can compute at once. Pinning its threads later changes neither.
std::vector<int> given_cpus();
int kept_cpu_count();

// This process's share among the processes of one host that train together: an equal part of its GPUs, and of its cores
// unless the launcher gave each process its own.
struct CpuPartition {
  int rank = 0;
  int size = 1;
  bool own_cores = false;

  int usable_cpu_count() const;  // at least 1
  std::vector<int> cpus() const;
};

// From now on this process has no more than its share of what it had at its start. For the thread that calls and those
// that it starts later.
void keep_to_partition(const CpuPartition& partition);

// Called at the end of each keep_to_partition, in its thread, with kept_cpu_count(): for modules that compute.
void after_partition(std::function<void(int cores)> act);

// Whether whoever started the processes gave this one cores that no other of its host may use, as mpirun does. All
// members call it.
bool has_own_cores(const World& world, Bootstrap& members, Deadline deadline);

}  // namespace lockstep::cluster
