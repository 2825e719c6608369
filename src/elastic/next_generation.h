// The members of a job's next generation: those that remain, and newcomers.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "cluster/liveness.h"
#include "elastic/members.h"
#include "elastic/registry.h"

namespace lockstep::elastic {

// How a member wants the next generation to differ. Members may want different changes.
struct Change {
  std::vector<int> lost = {};  // ranks that are known to be lost
  std::vector<Process> newcomers = {};
  bool leaves = false;   // this member leaves
  bool insists = false;  // the members that it takes for lost were taken in again, and did not come to their group
  int row_size = 1;      // the same for all: ranks that have one copy of a model together (elastic/members.h)
};

// Returns this member's view of the next generation. Collective over the members that remain. Left out are members that
// have gone, or do not call it by the deadline, and those that are in no whole row (elastic/members.h). Ranks keep
// their order, but for rows that are put together anew. Newcomers come after them, and get invitations. The first list
// of newcomers that a member enters counts. The first member that finds all entries closes the list. A member that
// leaves gets the others' view, in which its rank means nothing.
//
// Throws ClusterError on a member that is left out, and where it cannot reach most of the members' hosts. Throws
// InvalidArgument for ranks that do not exist.
Members next_generation(const Members& now, Registry& registry, const Change& change, Deadline deadline);

// Returns the lost ranks of this generation that the exception names, where it says that a member is lost (PeerLost,
// DeadlineExceeded with ranks, Aborted); others may know more. Returns none for other exceptions.
std::optional<std::vector<int>> lost_in(const std::exception& error, std::int64_t generation);

// Returns the first rank, but this one's, whose process is lost.
std::optional<int> first_lost(const Members& members, cluster::Liveness& liveness);

// Return the key, in a newcomer's host's store, of its place among the members; and the place that the entry gives,
// with the host and address of `self`. The second throws ClusterError where the newcomer was refused.
std::string key_of_invitation(const std::string& newcomer);
Members place_in(const std::string& invitation, const World& self);

// Refuses a newcomer, which gets a ClusterError with `reason`.
void refuse(Registry& registry, const Process& newcomer, const std::string& reason);

}  // namespace lockstep::elastic
