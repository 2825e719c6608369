#include "collective/message_passing/team.h"

#include <algorithm>

#include "kernels/accumulate.h"

namespace lockstep::collective {

std::byte* Scratch::take(std::size_t bytes) {
  if (bytes > bytes_) {
    memory_.reset(new (std::align_val_t{64}) std::byte[bytes]);
    bytes_ = bytes;
  }
  return memory_.get();
}

Team::Team(transport::Channels& channels, std::vector<int> members, const transport::MessageTag& tag, Deadline deadline,
           const char* operation, Scratch& scratch)
    : channels_(channels),
      members_(std::move(members)),
      tag_(tag),
      deadline_(deadline),
      operation_(operation),
      scratch_(scratch) {
  rank_ = static_cast<int>(std::find(members_.begin(), members_.end(), channels.rank()) - members_.begin());
}

void Team::exchange(std::vector<transport::Outgoing> outgoing, std::vector<transport::Incoming> incoming) {
  for (auto& message : outgoing) {
    message.to = members_[static_cast<std::size_t>(message.to)];
    message.tag = tag_;
  }
  for (auto& message : incoming) {
    message.from = members_[static_cast<std::size_t>(message.from)];
    message.tag = tag_;
  }
  channels_.exchange(outgoing, incoming, deadline_, operation_);
}

void Team::swap(int to, std::span<const std::byte> out, int from, std::span<std::byte> in) {
  exchange({{to, out.data(), out.size(), {}}}, {{from, in.data(), in.size(), nullptr, {}}});
}

void Team::swap_and_fold(int to, std::span<const std::byte> out, int from, const ElementOp& reduction, std::byte* into,
                         std::size_t count) {
  const auto fold = folding(reduction, into);
  exchange({{to, out.data(), out.size(), {}}}, {{from, nullptr, count * reduction.element(), &fold, {}}});
}

void Team::receive_and_fold(int from, const ElementOp& reduction, std::byte* into, std::size_t count) {
  const auto fold = folding(reduction, into);
  exchange({}, {{from, nullptr, count * reduction.element(), &fold, {}}});
}

transport::Consumer folding(const ElementOp& reduction, std::byte* into) {
  return [=](std::size_t at, const std::byte* data, std::size_t bytes) {
    kernels::accumulate(reduction.op, reduction.dtype, into + at, data, bytes / reduction.element());
  };
}

}  // namespace lockstep::collective
