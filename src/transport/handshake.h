// The handshake by which the two ends of a connection learn who the other is, and that it belongs to the job. Messages
// are sealed after it. A user has a token for jobs without one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "lockstep/base/deadline.h"
#include "lockstep/transport/access.h"
#include "transport/socket.h"

namespace lockstep::transport {

//   the end that connects            the end that accepts
//   Greeting, dialled, opening   ->
//                                <-  Greeting, Proof
//   Proof                        ->
//
// `dialled` is the address to which the connection was made. The opening proves the first greeting and this address,
// and for a loopback address also the host and network namespace. So an end that accepts keeps no stranger. A proof is
// the HMAC-SHA-256, under the job's token, of its maker's role, of both greetings and of the address that was dialled.
// So it is valid for this connection only, and cannot be sent back to its maker. Without a token the key is empty.
//
// A process that relays a handshake is dialled at its own address, which the end that accepts does not have. A
// session's keys are derived from these values too, and no relay can know them.
struct Greeting {
  std::array<char, 4> magic{'L', 'C', 'K', 'S'};
  std::uint32_t version = 4;
  std::array<char, 8> protocol{};  // the protocol that follows the handshake
  std::array<char, 32> group{};    // the group that the connection is for
  std::int64_t generation = 0;
  std::int32_t rank = 0;
  std::uint32_t number = 0;                // which of the connections between two ranks
  std::array<unsigned char, 32> random{};  // of this end and this connection
};
static_assert(sizeof(Greeting) == 96);

using Proof = std::array<unsigned char, 32>;

enum class End { connects, accepts };

// Both ends know this of a connection once they have proved that they belong to the job.
struct Handshake {
  Greeting connects;
  SocketAddress dialled;
  Greeting accepts;
};

// Keys for what each end sends.
struct SessionKeys {
  Proof connects{}, accepts{};
};

// Returns `greeting` with new random numbers.
Greeting fresh(Greeting greeting);

// Says why the other end's greeting is wrong: not ours, or of another version, protocol, group or generation. Empty
// where nothing is.
std::string problem_with(const Greeting& theirs, const Greeting& mine);

// The end that accepts must have the address that was dialled, or only its port. Bound::to_port lets networks translate
// addresses between hosts; a relay on either host is found by its port, or by its loopback address.
enum class Bound { to_address, to_port };

// True where a connection that was made to `dialled` may be accepted at `accepted`.
bool is_bound(const SocketAddress& dialled, const SocketAddress& accepted, Bound bound);

Proof prove_opening(const Access& access, const Greeting& connects, const SocketAddress& dialled);
Proof prove(const Access& access, End end, const Handshake& handshake);
SessionKeys session_keys(const Access& access, const Handshake& handshake);

// A number that follows from the token and `name`, and that nobody without the token can know.
std::uint64_t secret_number(const Access& access, const std::string& name);

bool equal(const Proof& a, const Proof& b);  // in constant time

// Ranks in the accepting end's greeting by which it refuses the connecting end. That end is not expected, or has
// dialled another address than it may with Bound::to_address, or with Bound::to_port.
inline constexpr std::int32_t kRefused = -2, kElsewhere = -3, kAtOtherPort = -4;

// The connecting end, which advances as bytes arrive. Used by one thread; the socket must outlive it.
class ConnectingEnd {
 public:
  // Sends the opening. Throws ClusterError.
  ConnectingEnd(const FileDescriptor& socket, const Access& access, const Greeting& who);

  // True once the other end has proved that it belongs to the job. Throws ClusterError saying what is wrong with it.
  bool advance();

  const Greeting& mine() const { return handshake_.connects; }
  const Greeting& theirs() const { return handshake_.accepts; }
  SessionKeys keys() const { return session_keys(access_, handshake_); }

 private:
  const FileDescriptor& socket_;
  const Access access_;
  Handshake handshake_;
  std::vector<std::byte> arrived_;  // of an incomplete value
  bool has_greeting_ = false;
};

// The whole handshake at the connecting end, which it returns. Throws ClusterError saying what is wrong with the other
// end, ConnectionClosed where it has ended the connection and not said why, and DeadlineExceeded.
ConnectingEnd introduce(const FileDescriptor& socket, const Access& access, const Greeting& who, Deadline deadline);

// A connection whose other end has proved that it belongs to the job.
struct Connection {
  FileDescriptor socket;
  Greeting theirs;
  SessionKeys keys;
};

// Connects and introduces itself. Connects again, until the deadline, where the connection is closed before the other
// end has greeted: a process with many connections turns away slow ones. Connects again too where the other end is
// silent for the time of an attempt: a stranger may have the port for a while. Throws as connect_to and introduce.
Connection connect_proved(const std::string& address, const Access& access, const Greeting& who, Deadline deadline,
                          std::chrono::duration<double> attempt = std::chrono::seconds(30));

// Returns the index of the first address whose end proves that it belongs to the job. All are asked at once, so a
// silent one delays no other. Returns nothing where no end has proved so by the deadline. `problem` then says what is
// wrong with the last end that answered.
std::optional<std::size_t> first_that_proves(std::span<const std::string> addresses, const Access& access,
                                             const Greeting& who, Deadline deadline, std::string& problem);

// Says why the process that has connected is refused, besides what problem_with finds; empty where it is not.
using Refuse = std::function<std::string(const Greeting&)>;

// The accepting end, which advances as bytes arrive. Used by one thread.
class AcceptingEnd {
 public:
  explicit AcceptingEnd(FileDescriptor socket, Bound bound = Bound::to_address)
      : socket_(std::move(socket)), bound_(bound) {}

  // Reads what has arrived and does not wait; true once the other end has proved that it belongs to the job. Throws
  // ClusterError saying what is wrong with it. The address that was dialled counts only where there is a token.
  bool advance(const Access& access, const Greeting& who, const Refuse& refuse);

  bool has_opened() const { return has_opened_; }                      // with a proof of its own
  bool has_sent() const { return has_greeted_ || !arrived_.empty(); }  // anything
  std::chrono::duration<double> age() const { return since_.waited(); }
  const Greeting& theirs() const { return handshake_.connects; }
  SessionKeys keys(const Access& access) const { return session_keys(access, handshake_); }
  const FileDescriptor& socket() const { return socket_; }
  FileDescriptor take_socket() { return std::move(socket_); }

 private:
  void answer(const Access& access, Greeting mine, const std::string& problem);

  FileDescriptor socket_;
  const Bound bound_;
  Deadline since_ = Deadline::never();
  std::vector<std::byte> arrived_;  // of an incomplete value
  bool has_greeted_ = false, has_opened_ = false;
  Handshake handshake_;
};

// Sealed messages on a connection whose ends have proved that they belong to the job. Whoever stands between the two
// can cut the connection, and can neither read nor change a message. Seals are for small messages: gradients are not
// sealed.
//
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

// A token that all processes of one user on one host have, for jobs whose launcher gives none.

// Returns the 32 bytes of `home`/.lockstep/token, which only its owner may read, and makes a missing file. Empty where
// nothing can be kept in `home`. Throws ClusterError, naming the file, where others could have read or written it.
std::string user_token(const std::string& home);

// The home folder of the user that this process acts for, by the system's list of users, else by HOME; may be empty.
std::string home_of_user();

// The token in the file `path`: 64 hexadecimal digits. Throws ClusterError that begins with `name`.
std::string read_token(const std::string& name, const std::string& path);

}  // namespace lockstep::transport
