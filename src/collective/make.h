// How backends between processes are made, by name.
#pragma once

#include <memory>

#include "collective/backend.h"
#include "lockstep/collective/make_group.h"
#include "transport/signal.h"

namespace lockstep::collective {

// A rank's place.
struct Place {
  std::string host;     // ranks that give one name share memory
  std::string address;  // where it listens for ranks of other hosts
  Access access;
  int cores = 1;  // that the ranks of its host may use together
};

// Collective among the members, which all give equal options.
std::shared_ptr<GroupBackend> make_shm_backend(cluster::Bootstrap& members, const Place& place,
                                               const GroupOptions& options, Deadline deadline);

// `network`: "tcp" or "ucx".
std::shared_ptr<GroupBackend> make_network_backend(const std::string& network, cluster::Bootstrap& members,
                                                   const Place& place, const GroupOptions& options,
                                                   transport::SpinThenBlock spin, Deadline deadline);

// Shared memory among the ranks of each host, and options.network among all ranks. `hosts[r]`: the name of rank r's
// host.
std::shared_ptr<GroupBackend> make_hierarchical_backend(cluster::Bootstrap& members, const Place& place,
                                                        const std::vector<std::string>& hosts,
                                                        const GroupOptions& options, Deadline deadline);

// Returns the cores that the ranks of this rank's host may use together, whether each has its own or all share some.
// Collective.
int cores_of_host(cluster::Bootstrap& members, const std::vector<std::string>& hosts, Deadline deadline);

// How ranks that share this many cores wait: on shared memory, and on sockets, where each check is a system call.
transport::SpinThenBlock spin_in_memory(int ranks, int cores);
transport::SpinThenBlock spin_at_sockets(int ranks, int cores);

}  // namespace lockstep::collective
