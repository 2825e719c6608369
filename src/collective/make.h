// How backends between processes are made, by name.
#pragma once

#include <memory>

#include "collective/backend.h"
#include "lockstep/world.h"
#include "transport/signal.h"

namespace lockstep {

// Collective among the members, which all give the same options.
std::shared_ptr<GroupBackend> make_shm_backend(Bootstrap& members, const GroupOptions& options, Deadline deadline);

// `network`: "tcp" or "ucx".
std::shared_ptr<GroupBackend> make_network_backend(const std::string& network, Bootstrap& members, const World& world,
                                                   const GroupOptions& options, Patience patience, Deadline deadline);

// Groups of ranks of one host over shared memory, and all of them over options.network. `hosts[r]`: the name of rank
// r's host.
std::shared_ptr<GroupBackend> make_hierarchical_backend(Bootstrap& members, const World& world,
                                                        const std::vector<std::string>& hosts,
                                                        const GroupOptions& options, Deadline deadline);

// How ranks that share the cores of one host should wait in memory, and at sockets, where each look is a system call.
Patience patience_in_memory(int ranks_on_this_host);
Patience patience_at_sockets(int ranks_on_this_host);

}  // namespace lockstep
