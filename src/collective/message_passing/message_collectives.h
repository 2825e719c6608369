// Every collective operation, for ranks that communicate by messages.
#pragma once

#include "collective/message_passing/algorithms.h"
#include "lockstep/collective/make_group.h"

namespace lockstep::collective {

// Carries out a collective call; `call.peer` and counts are in ranks of the team. Returns the algorithm's name.
// `all_counts`: of an all_to_all with counts, as in transfers_of.
const char* run_on_channels(Team& team, const Call& call, Implementation implementation,
                            std::span<const std::size_t> all_counts);

}  // namespace lockstep::collective
