// How the processes of a job find each other.
#pragma once

#include "lockstep/cluster/cluster.h"
#include "lockstep/cluster/store.h"

namespace lockstep::cluster {

struct Rendezvous {
  World world;  // its address is the one from which this machine reaches the store
  Store store;
  bool own_cores = false;  // whoever started the processes gave this one cores that no other of its host may use
};

// Finds the store of the job, or holds it: then until the process ends. Each process takes its rank there, and from
// then on computes on its share of its host's cores alone, where other ranks are on that host. Collective. A process
// that is alone has a store of its own.
//
// Throws as Store does; ClusterError, on all ranks, where two processes are of one rank or ranks disagree about their
// number; and DeadlineExceeded naming the ranks that have not come. A host's name that is not known yet is asked for
// again until the deadline.
Rendezvous rendezvous(const Cluster& cluster, Deadline deadline);

}  // namespace lockstep::cluster
