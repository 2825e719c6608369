// How backends between processes are made, by name.
#pragma once

#include <memory>

#include "collective/backend.h"
#include "lockstep/world.h"
#include "transport/signal.h"

namespace lockstep {

// Collective among the members, which all give the same options.
std::shared_ptr<GroupBackend> make_shm_backend(Bootstrap& members, const GroupOptions& options, Deadline deadline);
std::shared_ptr<GroupBackend> make_tcp_backend(Bootstrap& members, const World& world, const GroupOptions& options,
                                               Patience patience, Deadline deadline);

// How ranks that share the cores of one host should wait.
Patience patience_for(int ranks_on_this_host);

}  // namespace lockstep
