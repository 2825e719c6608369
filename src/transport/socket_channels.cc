#include "transport/network_channels.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace lockstep::transport {
namespace {

// The size of the buffer from which consumers get their bytes.
constexpr std::size_t kScratch = 1024 * 1024;
// One call sends at most this much, so that receiving has its turn.
constexpr std::size_t kMostAtOnce = 1024 * 1024;

}  // namespace

// Goes before each message.
//
//   tag 16 | bytes 8
struct SocketChannels::Header {
  MessageTag tag;
  std::uint64_t bytes;
};

struct SocketChannels::Scratch {
  alignas(64) std::byte bytes[kScratch];
};

struct SocketChannels::Sending {
  const Outgoing* message;
  Header header;
  std::size_t done = 0;  // header included

  int other() const { return message->to; }
  bool finished() const { return done == sizeof(Header) + message->bytes; }
};

struct SocketChannels::Receiving {
  const Incoming* message;
  Header header;
  std::size_t done = 0;      // header included
  std::size_t consumed = 0;  // of the message, by the consumer
  std::byte rest[64];        // bytes that have arrived beyond that

  int other() const { return message->from; }
  bool finished() const { return done == sizeof(Header) + message->bytes; }
};

SocketChannels::SocketChannels(const ChannelOptions& options, Sockets channels, Sockets alarms)
    : spin_(options.spin),
      channels_(std::move(channels)),
      failure_channel_(options.rank, options.generation, options.lost_host_seconds, std::move(alarms)),
      scratch_(std::make_unique<Scratch>()) {}

SocketChannels::~SocketChannels() = default;

void SocketChannels::exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming, Deadline deadline,
                              const char* operation) {
  failure_channel_.check();
  fail_point("tcp.before_exchange");
  std::vector<Sending> sendings;
  std::vector<Receiving> receivings;
  for (const auto& message : outgoing) sendings.push_back({&message, {message.tag, message.bytes}});
  for (const auto& message : incoming) receivings.push_back({&message, {}});

  std::vector<int> late;
  std::size_t receivers = 0;  // of `late`, those to whom this rank sends
  // Moves what can move; returns whether anything did.
  const auto step = [&] {
    late.clear();
    bool moved = move_in_order(sendings, late, [&](auto& sending) { return push(sending, operation); });
    receivers = late.size();
    moved |= move_in_order(receivings, late, [&](auto& receiving) { return pull(receiving, operation); });
    return moved;
  };

  while (true) {
    const bool moved = spin_until(spin_, [&] { return step() || late.empty(); });
    fail_point("tcp.in_exchange");
    if (late.empty()) return;
    if (moved) {
      failure_channel_.check(late, deadline, operation);
    } else {
      std::vector<pollfd> polls;
      for (std::size_t i = 0; i < late.size(); ++i)
        polls.push_back({channel(late[i]), static_cast<short>(i < receivers ? POLLOUT : POLLIN), 0});
      failure_channel_.wait(polls, late, deadline, operation);
    }
  }
}

bool SocketChannels::push(Sending& sending, const char* operation) {
  const auto header_left = sending.done < sizeof(Header) ? sizeof(Header) - sending.done : 0;
  const auto at = sending.done - (sizeof(Header) - header_left);
  iovec parts[2] = {
      {reinterpret_cast<std::byte*>(&sending.header) + sending.done, header_left},
      {const_cast<std::byte*>(sending.message->data) + at, std::min(sending.message->bytes - at, kMostAtOnce)}};
  msghdr message{};
  message.msg_iov = header_left > 0 ? parts : parts + 1;
  message.msg_iovlen = header_left > 0 ? 2 : 1;
  const auto count = sendmsg(channel(sending.message->to), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count < 0 && errno != EAGAIN && errno != EINTR) failure_channel_.lost(sending.message->to, operation);
  if (count <= 0) return false;
  sending.done += static_cast<std::size_t>(count);
  return true;
}

// Reads no further than the end of this message. With a consumer, fewer than 64 bytes are kept until more arrive.
bool SocketChannels::pull(Receiving& receiving, const char* operation) {
  const auto& message = *receiving.message;
  const auto header_left = receiving.done < sizeof(Header) ? sizeof(Header) - receiving.done : 0;
  const auto at = receiving.done - (sizeof(Header) - header_left);
  const auto kept = at - receiving.consumed;
  if (message.consumer != nullptr && kept > 0) std::memcpy(scratch_->bytes, receiving.rest, kept);
  std::byte* const into = message.consumer == nullptr ? message.data + at : scratch_->bytes + kept;
  const auto room = message.consumer == nullptr ? message.bytes - at : std::min(message.bytes - at, kScratch - kept);
  iovec parts[2] = {{reinterpret_cast<std::byte*>(&receiving.header) + receiving.done, header_left}, {into, room}};
  msghdr request{};
  request.msg_iov = header_left > 0 ? parts : parts + 1;
  request.msg_iovlen = header_left > 0 ? 2 : 1;
  const auto count = recvmsg(channel(message.from), &request, MSG_DONTWAIT);
  if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) failure_channel_.lost(message.from, operation);
  if (count < 0) return false;
  receiving.done += static_cast<std::size_t>(count);
  if (receiving.done < sizeof(Header)) return true;
  if (header_left > 0 && (receiving.header.tag != message.tag || receiving.header.bytes != message.bytes)) {
    throw WrongMessage{message.from, receiving.header.tag, receiving.header.bytes};
  }
  const auto arrived = receiving.done - sizeof(Header);
  if (message.consumer == nullptr || arrived == receiving.consumed) return true;
  const auto ready = receiving.finished() ? arrived - receiving.consumed : (arrived - receiving.consumed) / 64 * 64;
  if (ready > 0) (*message.consumer)(receiving.consumed, scratch_->bytes, ready);
  receiving.consumed += ready;
  std::memcpy(receiving.rest, scratch_->bytes + ready, arrived - receiving.consumed);
  return true;
}

std::unique_ptr<Channels> make_socket_channels(const ChannelOptions& options, const AllGather& all_gather,
                                               Deadline deadline) {
  auto sockets = connect_all(options, 2, all_gather, deadline);
  return std::make_unique<SocketChannels>(options, std::move(sockets[0]), std::move(sockets[1]));
}

}  // namespace lockstep::transport
