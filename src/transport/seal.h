// Sealed messages on a connection whose ends have proved that they belong to the job. Whoever stands between the two
// can cut the connection, and can neither read nor change a message. Seals are for small messages: gradients are not
// sealed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "transport/handshake.h"

namespace lockstep::transport {

// One end. ChaCha20-Poly1305 (RFC 8439) with the session's keys; the numbers of messages are the nonces, so that none
// can be left out, repeated or sent back. Used by one thread at a time.
//
//   length 4 | sealed message | tag 16        the length is of what follows
class Seal {
 public:
  static constexpr std::size_t kTag = 16;

  Seal() = default;  // of no connection
  Seal(const SessionKeys& keys, End end);

  // Returns the sealed message with the length before it. The other end must open messages in the order in which they
  // were closed.
  std::string close(std::string_view message);

  // Opens a sealed message, without the length. Throws ClusterError where it is not the next one that the other end has
  // closed.
  std::string open(std::string_view sealed);

 private:
  Proof to_send_{}, to_receive_{};  // keys
  std::uint64_t sent_ = 0, received_ = 0;
};

}  // namespace lockstep::transport
