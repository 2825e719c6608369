// Channels of mailboxes in shared memory: each ordered pair of ranks has two chunks, filled and emptied in turn.
#pragma once

#include <memory>
#include <vector>

#include "transport/channels.h"
#include "transport/shared_space.h"

namespace lockstep::transport {

// A message is cut into chunks of at most kChunk bytes; each carries the message's tag and size.
struct Mailbox {
  static constexpr std::size_t kChunk = 64 * 1024;
  static constexpr std::uint32_t kChunks = 2;
  struct Chunk {
    MessageTag tag;
    std::uint64_t message_bytes;
    alignas(64) std::byte data[kChunk];
  };

  alignas(64) std::atomic<std::uint32_t> sent;   // chunks; written by the sender
  alignas(64) std::atomic<std::uint32_t> taken;  // written by the receiver
  Chunk chunks[kChunks];
};

class MemoryChannels final : public Channels {
 public:
  explicit MemoryChannels(std::shared_ptr<SpaceMember> member) : member_(std::move(member)) {}

  int rank() const override { return member_->rank(); }
  int size() const override { return member_->size(); }
  void exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming, Deadline deadline,
                const char* operation) override;
  void fail(const Failure& failure) override { member_->fail(failure); }
  void give_up(std::span<const int> late, Deadline deadline, const char* operation) override {
    member_->give_up(member_->late(late, deadline, operation));
  }
  void check() override { member_->check(); }

 private:
  Mailbox& mailbox(int from, int to) const;
  bool push(const Outgoing& message, std::size_t& done);
  bool pull(const Incoming& message, std::size_t& done);

  const std::shared_ptr<SpaceMember> member_;
};

}  // namespace lockstep::transport
