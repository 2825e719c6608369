// Channels of mailboxes in shared memory: each ordered pair of ranks has some chunks, filled and emptied in turn.
#pragma once

#include <algorithm>
#include <bit>
#include <memory>

#include "transport/channels.h"
#include "transport/shared_space.h"

namespace lockstep::transport {

// A message is cut into chunks of at most kChunk bytes; each carries the message's tag and size. The chunks lie after
// this header.
struct Mailbox {
  static constexpr std::size_t kChunk = 64 * 1024;
  struct Chunk {
    MessageTag tag;
    std::uint64_t message_bytes;
    alignas(64) std::byte data[kChunk];
  };

  // The number of chunks of a mailbox. With few ranks, a message of up to 2 MiB is sent before its receiver comes.
  // Pages that no message has reached take no memory.
  static constexpr std::uint32_t chunks_for(int ranks) {
    constexpr std::size_t kAll = std::size_t{64} << 20;
    const auto pairs = static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks);
    return std::bit_floor(static_cast<std::uint32_t>(std::clamp<std::size_t>(kAll / (pairs * kChunk), 2, 32)));
  }
  static constexpr std::size_t bytes_for(int ranks) { return sizeof(Mailbox) + chunks_for(ranks) * sizeof(Chunk); }

  Chunk& chunk(std::uint32_t number, std::uint32_t chunks) {
    return reinterpret_cast<Chunk*>(this + 1)[number % chunks];
  }

  alignas(64) std::atomic<std::uint32_t> sent;   // chunks; written by the sender
  alignas(64) std::atomic<std::uint32_t> taken;  // written by the receiver
};

class MemoryChannels final : public Channels {
 public:
  explicit MemoryChannels(std::shared_ptr<SpaceMember> member)
      : member_(std::move(member)), chunks_(Mailbox::chunks_for(member_->size())) {}

  int rank() const override { return member_->rank(); }
  int size() const override { return member_->size(); }
  void exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming, Deadline deadline,
                const char* operation) override;
  void fail(const Failure& failure) override { member_->fail(failure); }
  void give_up(std::span<const int> late, Deadline deadline, const char* operation) override {
    member_->give_up(member_->late(late, deadline, operation));
  }
  void check() override { member_->check(); }
  void look(const char* operation, bool also_left) override { member_->look(operation, also_left); }
  ShownNumbers& numbers() override { return *member_; }

 private:
  Mailbox& mailbox(int from, int to) const;
  bool push(const Outgoing& message, std::size_t& done);
  bool pull(const Incoming& message, std::size_t& done);

  const std::shared_ptr<SpaceMember> member_;
  const std::uint32_t chunks_;  // of each mailbox; sent and taken count modulo 2^32, a multiple of it
};

}  // namespace lockstep::transport
