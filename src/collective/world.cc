#include "lockstep/world.h"

#include <algorithm>
#include <set>

#include "base/text.h"
#include "cluster/store_bootstrap.h"
#include "collective/make.h"
#include "lockstep/group_wrappers.h"
#include "transport/ucx_mesh.h"

namespace lockstep {

const char* name_of(Implementation implementation) {
  switch (implementation) {
    case Implementation::automatic: return "auto";
    case Implementation::direct: return "direct";
    case Implementation::ring: return "ring";
    case Implementation::halving_doubling: return "halving_doubling";
    case Implementation::tree: return "tree";
    case Implementation::pairwise: return "pairwise";
    case Implementation::reduction_to_one_device: return "reduction_to_one_device";
  }
  return "unknown";
}

Implementation implementation_named(const std::string& name) {
  std::string allowed;
  for (int i = 0; i <= static_cast<int>(Implementation::reduction_to_one_device); ++i) {
    const auto implementation = static_cast<Implementation>(i);
    if (name == name_of(implementation)) return implementation;
    allowed += text(i == 0 ? "" : ", ", name_of(implementation));
  }
  throw InvalidArgument(text("there is no implementation \"", name, "\"; there are ", allowed));
}

namespace {

// What all ranks must want alike.
std::string describe(const GroupOptions& options) {
  return text("backend \"", options.backend, "\", network \"", options.network, "\", implementation ",
              name_of(options.implementation), ", bytes_per_pack ", options.bytes_per_pack, ", checked_calls ",
              options.checked_calls);
}

std::shared_ptr<GroupBackend> make_backend(Bootstrap& members, const World& world, const GroupOptions& options,
                                           Deadline deadline) {
  if (options.network != "tcp" && options.network != "ucx") {
    throw InvalidArgument(text("make_group: there is no network \"", options.network, "\"; there are tcp and ucx"));
  }
  // Every rank says where it is and what it wants, so that all choose alike or all hear that they differ.
  const auto hosts = members.all_gather(world.host, deadline);
  const auto wanted = members.all_gather(describe(options), deadline);
  for (int r = 1; r < world.size; ++r) {
    const auto& other = wanted[static_cast<std::size_t>(r)];
    if (other != wanted[0]) {
      throw InvalidArgument(text("make_group: rank 0 wants ", wanted[0], "; rank ", r, " wants ", other));
    }
  }
  const bool one_host = std::all_of(hosts.begin(), hosts.end(), [&](const auto& host) { return host == hosts[0]; });
  const bool all_apart = std::set<std::string>(hosts.begin(), hosts.end()).size() == hosts.size();
  const auto on_my_host = static_cast<int>(std::count(hosts.begin(), hosts.end(), world.host));
  const std::string backend = options.backend != "auto" ? options.backend
                              : one_host                ? "shm"
                              : all_apart               ? options.network
                                                        : "hierarchical";
  if (backend == "shm" && !one_host) {
    throw InvalidArgument(text("make_group: the backend \"shm\" is for ranks of one host; these are on ", join(hosts)));
  }
  if (backend == "ucx" || (backend == "hierarchical" && options.network == "ucx")) {
    const auto reasons = members.all_gather(why_no_ucx(), deadline);
    for (std::size_t r = 0; r < reasons.size(); ++r) {
      if (!reasons[r].empty()) throw InvalidArgument(text("make_group: rank ", r, ": ", reasons[r]));
    }
  }
  if (backend == "shm") return make_shm_backend(members, options, deadline);
  if (backend == "tcp" || backend == "ucx") {
    return make_network_backend(backend, members, world, options, patience_at_sockets(on_my_host), deadline);
  }
  if (backend == "hierarchical") return make_hierarchical_backend(members, world, hosts, options, deadline);
  throw InvalidArgument(
      text("make_group: there is no backend \"", backend, "\"; there are auto, shm, tcp, ucx and hierarchical"));
}

}  // namespace

Group make_group(const World& world, const Store& store, const GroupOptions& options) {
  if (world.size < 1 || world.rank < 0 || world.rank >= world.size) {
    throw InvalidArgument(text("World: rank ", world.rank, " of ", world.size, "; ranks are 0 to size - 1"));
  }
  const auto deadline = Deadline::after(std::chrono::duration<double>(options.timeout_seconds));
  // The number of this group among those that this rank made here is the same on all ranks.
  const auto number = store.add(text("generation ", world.generation, "/groups of rank ", world.rank), 1, deadline);
  StoreBootstrap members(world, store, text("group ", number));
  const Group group(make_backend(members, world, options, deadline), options.bytes_per_pack);
  return group.backend() == "shm" || options.checked_calls == 0 ? group : with_checks(group, options.checked_calls);
}

}  // namespace lockstep
