// The Group of a later generation of an elastic job.
#pragma once

#include "lockstep/collective/group.h"
#include "lockstep/elastic/job.h"

namespace lockstep::elastic {

// As job.group(options), but that nobody waits for a member that goes meanwhile: PeerLost names it. Collective.
Group group_of_generation(const Job& job, const GroupOptions& options);

}  // namespace lockstep::elastic
