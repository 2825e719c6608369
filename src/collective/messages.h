// Sends, receives and tables of counts, for every backend that has channels.
#pragma once

#include <span>
#include <vector>

#include "collective/backend.h"
#include "collective/calls.h"
#include "transport/channels.h"

namespace lockstep::collective {

// Messages carry as their tag the signature of their call; `sequence` counts collective calls.
static_assert(std::is_same_v<transport::MessageTag, SignatureWords>);

// InvalidArgument that says what was expected and what came.
[[noreturn]] void throw_wrong_message(const transport::WrongMessage& message, int rank, const Signature& mine,
                                      std::uint32_t sequence);

// Carries out sends and receives side by side.
void exchange_messages(transport::Channels& channels, std::span<const Call> calls, Deadline deadline);

// The input counts of every rank's all_to_all, [from * size + to]. Collective. Throws InvalidArgument on all ranks when
// what one sends is not what the other expects.
std::vector<std::size_t> gather_counts(GroupBackend& backend, const Call& call, Deadline deadline);

}  // namespace lockstep::collective
