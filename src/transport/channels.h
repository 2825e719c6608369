// Messages between the ranks of a group, pair by pair.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/failure.h"
#include "lockstep/base/deadline.h"
#include "transport/shown_numbers.h"

namespace lockstep::transport {

// Sender and receiver must agree on the tag, and on the size. Channels compare tags and do not interpret them.
using MessageTag = std::array<std::uint64_t, 2>;

struct Outgoing {
  int to;
  const std::byte* data;
  std::size_t bytes;
  MessageTag tag;
};

// Takes what arrives, in order: `data` holds `bytes` bytes of the message from offset `at` and is gone after the call.
// Pieces begin at multiples of 64 bytes, in memory aligned to 64.
using Consumer = std::function<void(std::size_t at, const std::byte* data, std::size_t bytes)>;

struct Incoming {
  int from;
  std::byte* data;  // where the message goes, unless there is a consumer
  std::size_t bytes;
  const Consumer* consumer;
  MessageTag tag;
};

// A message came that is not the one that was expected.
struct WrongMessage {
  int from;
  MessageTag tag;
  std::uint64_t bytes;
};

// One rank's end. One thread at a time calls exchange; any thread may call fail.
class Channels {
 public:
  virtual ~Channels() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Sends and receives all messages, side by side, and returns when the buffers may be used again. Messages of one pair
  // arrive in order. A rank sends nothing to itself. Throws WrongMessage (channels cannot be used any more then), and
  // raises the failure that comes first.
  virtual void exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming, Deadline deadline,
                        const char* operation) = 0;

  // Reports a failure to every rank; the first one is kept.
  virtual void fail(const Failure& failure) = 0;

  // Raises DeadlineExceeded, as an exchange does whose deadline passed while it waited for `late`.
  virtual void give_up(std::span<const int> late, Deadline deadline, const char* operation) = 0;

  // Raises the first failure.
  virtual void check() = 0;

  // As check, and raises PeerLost, during `operation`, for a rank that has ended, or, with `also_left`, has left.
  // As exchange.
  virtual void look(const char* operation, bool also_left) = 0;

  // Valid as long as the channels are.
  virtual ShownNumbers& numbers() = 0;
};

}  // namespace lockstep::transport
