// The operations that `lockstep run --timeline` shows.
#pragma once

#include "lockstep/cluster/store.h"
#include "lockstep/collective/group.h"

namespace lockstep::collective {

// True where the launcher asks for a timeline (LOCKSTEP_TIMELINE).
bool timeline_is_wanted();

// Records the first 50,000 operations of the group, and leaves them in the store when the group ends. Groups that are
// split from it are not recorded. Collective: the first such group of a process sets its clock, from one barrier.
Group with_published_timeline(const Group& group, const Store& store, Deadline deadline);

}  // namespace lockstep::collective
