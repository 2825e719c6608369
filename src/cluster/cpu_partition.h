// This process among those of its host: which cores are its own.
#pragma once

#include <string>
#include <vector>

#include "cluster/bootstrap.h"
#include "lockstep/cluster/world.h"

namespace lockstep::cluster {

// The cores that this process was given: those that it might use when it first asked, or its share by
// `keep_to_partition`; and on how many of them it can compute at once. Later its threads keep to some of them.
std::vector<int> given_cpus();
int kept_cpu_count();

// Of this process, among those that train on one host: each has an equal part of its GPUs, and of its cores unless
// whoever started the processes gave each its own.
struct CpuPartition {
  int rank = 0;
  int size = 1;
  bool own_cores = false;

  int usable_cpu_count() const;  // at least 1
  std::vector<int> cpus() const;
};

// From now on this process has no more than its share of what it had at its start. For the thread that calls and those
// that it starts later.
void keep_to_partition(const CpuPartition& share);

// Whether whoever started the processes gave this one cores that no other of its host may use, as mpirun does. All
// members call it.
bool has_own_cores(const World& world, Bootstrap& members, Deadline deadline);

}  // namespace lockstep::cluster
