// How the processes of a job find each other.
#pragma once

#include "lockstep/cluster/cluster.h"
#include "lockstep/cluster/store.h"

namespace lockstep::cluster {

// The entry that the store has once all processes have come.
inline constexpr const char* kJobHasBegun = "the job has begun";

// Entries of an elastic job. In a host's store, the first lists the stores of the hosts that the job had when this one
// came, one a line. In the launcher's store, entries that begin with the second name each host's.
inline constexpr const char* kKnownStores = "known stores";
inline constexpr const char* kStoreOfHost = "store of host ";

// An entry of each store of an elastic job, the launcher's also. It has the generation's number, and for each member
// its name, the address of its host's store and its host, one a line.
inline constexpr const char* kMembersNow = "members now";
// These names begin alike. "process-RANK" is a process with which the job began, "newcomer-RANK-RESTART-..." one that
// came later. RANK and RESTART are its LOCKSTEP_RANK and LOCKSTEP_RESTART, by which its launcher knows it.
inline constexpr const char *kProcess = "process-", *kNewcomer = "newcomer-";

// The entry in which a process that came to a job says why it was not taken in. Its launcher does not start such a
// process again.
std::string key_of_refusal(const std::string& rank, const std::string& restart);
inline constexpr const char *kDoesNotFit = "it does not fit", *kNobodyIsLeft = "nobody is left to take it in";

// The entry that an elastic training leaves: the names of its members at its end, one a line.
inline constexpr const char* kMembersAtEnd = "members at the end";

struct Rendezvous {
  World world;  // its address is the one from which this machine reaches the store
  Store store;
  bool own_cores = false;  // whoever started the processes gave this one cores that no other of its host may use
};

// Finds the store of the job, or holds it until the process ends. Each process registers its rank there and, where
// other ranks are on its host, computes from then on only on its share of the host's cores. Collective. A process that
// is alone has a store of its own.
//
// Throws as Store does. Throws ClusterError, on all ranks, where two processes have one rank or ranks disagree about
// their number; and DeadlineExceeded naming the ranks that have not come. A host name that does not resolve yet is
// looked up again until the deadline.
Rendezvous rendezvous(const Cluster& cluster, Deadline deadline);

// Finds the store of the job, or holds it, as rendezvous does, but registers nothing: a process that is started again
// finds the store too. Not collective. Throws as Store does.
Rendezvous find_store(const Cluster& cluster, Deadline deadline);

// Holds a store on all addresses of this machine, as TensorFlow does: its own name may not resolve to it yet, or
// resolve elsewhere. A loopback address is listened on alone. Throws as Store::hold.
Store hold_at(const std::string& host, int port, const Access& access = access_of_environment());

}  // namespace lockstep::cluster
