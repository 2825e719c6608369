#include "lockstep/world.h"

#include "base/text.h"
#include "cluster/store_bootstrap.h"
#include "collective/make.h"

namespace lockstep {

const char* name_of(Implementation implementation) {
  switch (implementation) {
    case Implementation::automatic: return "auto";
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

Group make_group(const World& world, const Store& store, const GroupOptions& options) {
  if (world.size < 1 || world.rank < 0 || world.rank >= world.size) {
    throw InvalidArgument(text("World: rank ", world.rank, " of ", world.size, "; ranks are 0 to size - 1"));
  }
  const auto deadline = Deadline::after(std::chrono::duration<double>(options.timeout_seconds));
  // The number of this group among those that this rank made here is the same on all ranks.
  const auto number = store.add(text("generation ", world.generation, "/groups of rank ", world.rank), 1, deadline);
  StoreBootstrap members(world, store, text("group ", number));
  return Group(make_shm_backend(members, options, deadline));
}

}  // namespace lockstep
