#include "transport/memory_channels.h"

#include <cstring>

namespace lockstep::transport {
namespace {

constexpr std::size_t kFinished = ~std::size_t{0};

// Bytes that are done, or kFinished: an empty message too needs its one chunk.
std::size_t advanced(std::size_t done, std::size_t step, std::size_t total) {
  return done + step == total ? kFinished : done + step;
}

}  // namespace

Mailbox& MemoryChannels::mailbox(int from, int to) const {
  return *reinterpret_cast<Mailbox*>(member_->space().mailbox(from, to));
}

void MemoryChannels::exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming, Deadline deadline,
                              const char* operation) {
  member_->check();
  std::vector<std::size_t> sent(outgoing.size()), received(incoming.size());
  auto& wake_up = member_->space().control_block(rank()).wake_up;
  std::vector<int> late;

  // Moves what can be moved now; returns whether anything was. Messages to one rank are sent one after the other.
  const auto step = [&] {
    bool moved = false;
    late.clear();
    for (std::size_t i = 0; i < outgoing.size(); ++i) {
      const bool waits = std::find(late.begin(), late.end(), outgoing[i].to) != late.end();
      while (!waits && sent[i] != kFinished && push(outgoing[i], sent[i])) moved = true;
      if (sent[i] != kFinished) late.push_back(outgoing[i].to);
    }
    const auto senders = late.size();
    for (std::size_t i = 0; i < incoming.size(); ++i) {
      const auto first = late.begin() + static_cast<std::ptrdiff_t>(senders);
      const bool waits = std::find(first, late.end(), incoming[i].from) != late.end();
      while (!waits && received[i] != kFinished && pull(incoming[i], received[i])) moved = true;
      if (received[i] != kFinished) late.push_back(incoming[i].from);
    }
    return moved;
  };

  while (true) {
    const auto seen = wake_up.value();
    const bool moved = step();
    if (late.empty()) return;
    if (moved) {
      member_->check();
      if (deadline.passed()) give_up(late, deadline, operation);
      continue;
    }
    if (spin_until(member_->spin(), [&] { return wake_up.value() != seen; })) continue;
    const auto wrong = member_->trouble(late, deadline, operation);
    if (step()) continue;  // what a rank sent before it left counts
    if (late.empty()) return;
    if (wrong) member_->give_up(wrong->failure);
    member_->block_while(wake_up, seen, deadline);
  }
}

bool MemoryChannels::push(const Outgoing& message, std::size_t& done) {
  auto& box = mailbox(rank(), message.to);
  const auto number = box.sent.load(std::memory_order_relaxed);
  if (number - box.taken.load(std::memory_order_acquire) >= chunks_) return false;
  auto& chunk = box.chunk(number, chunks_);
  const auto bytes = std::min(Mailbox::kChunk, message.bytes - done);
  chunk.tag = message.tag;
  chunk.message_bytes = message.bytes;
  if (bytes > 0) std::memcpy(chunk.data, message.data + done, bytes);
  box.sent.store(number + 1, std::memory_order_release);
  member_->space().control_block(message.to).wake_up.add(1);
  done = advanced(done, bytes, message.bytes);
  return true;
}

bool MemoryChannels::pull(const Incoming& message, std::size_t& done) {
  auto& box = mailbox(message.from, rank());
  const auto number = box.taken.load(std::memory_order_relaxed);
  if (box.sent.load(std::memory_order_acquire) == number) return false;
  const auto& chunk = box.chunk(number, chunks_);
  if (chunk.tag != message.tag || chunk.message_bytes != message.bytes) {
    throw WrongMessage{message.from, chunk.tag, chunk.message_bytes};
  }
  const auto bytes = std::min(Mailbox::kChunk, message.bytes - done);
  if (message.consumer != nullptr && bytes > 0) (*message.consumer)(done, chunk.data, bytes);
  if (message.consumer == nullptr && bytes > 0) std::memcpy(message.data + done, chunk.data, bytes);
  box.taken.store(number + 1, std::memory_order_release);
  member_->space().control_block(message.from).wake_up.add(1);
  done = advanced(done, bytes, message.bytes);
  return true;
}

}  // namespace lockstep::transport
