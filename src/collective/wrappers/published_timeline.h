// What `lockstep run --timeline` shows.
#pragma once

#include "lockstep/cluster/store.h"
#include "lockstep/collective/group.h"

namespace lockstep::collective {

// Whether the launcher asks for a timeline (LOCKSTEP_TIMELINE).
bool timeline_is_wanted();

// Records the first 50,000 operations of the group, but not those of groups that are split from it, and leaves them in
// the store when the group ends. Collective: the first such group of a process sets its clock, from one barrier.
Group with_published_timeline(const Group& group, const Store& store, Deadline deadline);

}  // namespace lockstep::collective
