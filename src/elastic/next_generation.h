// The members of a job's next generation: those that remain, and newcomers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "elastic/registry.h"
#include "lockstep/cluster/world.h"

namespace lockstep::elastic {

// A process that waits to be taken in.
struct Newcomer {
  std::int64_t number = 0;  // unique in the job
  std::string host;

  bool operator==(const Newcomer&) const = default;
};

// How a member wants the next generation to differ. Members may want different changes.
struct Change {
  std::vector<int> lost = {};  // ranks that are known to be lost
  std::vector<Newcomer> newcomers = {};
  bool leaves = false;  // this member does
};

// The World of this member in the next generation. Collective over the others; those that do not call it by the
// deadline are left out. Ranks keep their order, and newcomers come after them; these are told their Worlds, which
// `invitation` returns there. Newcomers are taken in where the first member that has found all entries, or one before
// it, wants them. What a member that leaves gets is the World of the others, and its rank there means nothing.
//
// Throws ClusterError on a member that the others left out, and InvalidArgument for ranks that do not exist.
World next_generation(const World& world, Registry& registry, const Change& change, Deadline deadline);

// Waits for the World of the newcomer, whose host and address are `self`'s. Throws ClusterError where it is refused,
// and DeadlineExceeded.
World invitation(const World& self, Registry& registry, std::int64_t newcomer, Deadline deadline);

bool was_invited(Registry& registry, std::int64_t newcomer, Deadline deadline);

// A newcomer that cannot be taken in gets a ClusterError with `reason`.
void refuse(Registry& registry, std::int64_t newcomer, const std::string& reason, Deadline deadline);

}  // namespace lockstep::elastic
