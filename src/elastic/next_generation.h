// The members of a job's next generation: those that remain, and newcomers.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "elastic/members.h"
#include "elastic/registry.h"

namespace lockstep::elastic {

// How a member wants the next generation to differ. Members may want different changes.
struct Change {
  std::vector<int> lost = {};  // ranks that are known to be lost
  std::vector<Process> newcomers = {};
  bool leaves = false;   // this member does
  bool insists = false;  // the members that it takes for lost were taken in again, and did not come to their group
  int row_size = 1;      // the same for all: ranks that have one copy of a model together (elastic/rows.h)
};

// This member's view of the next generation. Collective over the others. Those that have gone, and those that do not
// call it by the deadline, are left out; so are those that are in no whole row (elastic/rows.h). Ranks keep their
// order, but for rows that are put together anew, and newcomers come after them; `invitation` returns there what they
// are told. The first list of newcomers that a member enters counts, and the first member that finds all entries closes
// it. What a member that leaves gets is the view of the others, and its rank there means nothing.
//
// Throws ClusterError on a member that is left out, and where it cannot reach most of the members' hosts; and
// InvalidArgument for ranks that do not exist.
Members next_generation(const Members& now, Registry& registry, const Change& change, Deadline deadline);

// Where the exception says that a member is lost (PeerLost, DeadlineExceeded with ranks, Aborted): the ranks of this
// generation that are known to be; others may know more.
std::optional<std::vector<int>> lost_in(const std::exception& error, std::int64_t generation);

// The first rank, but this one's, whose process has gone.
std::optional<int> first_gone(const Members& members, Registry& registry);

// Where a newcomer finds, in its host's store, the place that it has got among the members; and what it says. Its host
// and address are `self`'s. Throws ClusterError where it was refused.
std::string key_of_invitation(const std::string& newcomer);
Members place_in(const std::string& invitation, const World& self);

// A newcomer that cannot be taken in gets a ClusterError with `reason`.
void refuse(Registry& registry, const Process& newcomer, const std::string& reason);

}  // namespace lockstep::elastic
