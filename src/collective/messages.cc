#include "collective/messages.h"

#include "base/text.h"

namespace lockstep::collective {
namespace {

// The signature on either side of a message.
Signature message_signature(const Call& call) {
  const auto count = call.kind == Call::Kind::send ? call.input.count : call.output.count;
  return {.kind = Call::Kind::send,
          .dtype = call.input.dtype,
          .shape = count & Signature::kShape,
          .purpose = call.purpose.hash()};
}

}  // namespace

void throw_wrong_message(const transport::WrongMessage& message, int rank, const Signature& mine,
                         std::uint32_t sequence) {
  const auto theirs = sequence_in(message.tag);
  if (signature_in(message.tag) == mine && theirs != sequence) {
    throw InvalidArgument(text("the ranks' calls differ: rank ", rank, " is in its collective call number ", sequence,
                               ", rank ", message.from, " in number ", theirs));
  }
  throw_calls_differ(rank, mine, message.from, signature_in(message.tag));
}

void exchange_messages(transport::Channels& channels, std::span<const Call> calls, Deadline deadline) {
  std::vector<transport::Outgoing> outgoing;
  std::vector<transport::Incoming> incoming;
  for (const auto& call : calls) {
    if (call.kind == Call::Kind::send) {
      outgoing.push_back({call.peer, bytes_of(call.input), call.input.bytes(), pack(message_signature(call))});
    } else {
      incoming.push_back(
          {call.peer, bytes_of(call.output), call.output.bytes(), nullptr, pack(message_signature(call))});
    }
  }
  try {
    channels.exchange(outgoing, incoming, deadline, name_of(calls.front().kind));
  } catch (const transport::WrongMessage& message) {
    channels.fail(Failure::aborted(channels.rank(), "the ranks' messages differ"));
    for (const auto& call : calls) {
      if (call.kind == Call::Kind::recv && call.peer == message.from) {
        throw_wrong_message(message, channels.rank(), message_signature(call), 0);
      }
    }
    throw;
  }
}

std::vector<std::size_t> gather_counts(GroupBackend& backend, const Call& call, Deadline deadline) {
  const auto size = static_cast<std::size_t>(backend.size());
  static_assert(sizeof(std::size_t) == sizeof(std::int64_t));
  const auto table_of = [&](const Counts& counts) {
    Counts mine = counts, all(size * size);
    auto gather = Call::all_gather({mine.data(), size, DType::int64}, {all.data(), all.size(), DType::int64});
    gather.purpose = call.purpose;
    backend.run(gather, deadline);
    return all;
  };
  const auto sent = table_of(call.counts), expected = table_of(call.output_counts);
  for (std::size_t from = 0; from < size; ++from) {
    for (std::size_t to = 0; to < size; ++to) {
      if (sent[from * size + to] == expected[to * size + from]) continue;
      throw InvalidArgument(text("all_to_all: rank ", from, " sends ", sent[from * size + to], " elements to rank ", to,
                                 ", which expects ", expected[to * size + from]));
    }
  }
  return sent;
}

}  // namespace lockstep::collective
