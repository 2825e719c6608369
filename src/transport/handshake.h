// How the two ends of a connection learn who the other is, and that it belongs to the job.
//
//   the end that connects      the end that accepts
//   Greeting               ->
//                          <-  Greeting, Proof
//   Proof                  ->
//
// A proof is the HMAC-SHA-256, under the job's token, of the role of the end that makes it and of both greetings. So it
// is valid for this connection only, and cannot be sent back to its maker. Without a token the key is empty.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "lockstep/base/deadline.h"
#include "lockstep/transport/access.h"

namespace lockstep::transport {

struct Greeting {
  std::array<char, 4> magic{'L', 'C', 'K', 'S'};
  std::uint32_t version = 2;
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

// The same with new random numbers.
Greeting fresh(Greeting greeting);

// What is wrong with the other end's greeting: not ours, or of another version, protocol, group or generation. Empty
// where nothing is.
std::string problem_with(const Greeting& theirs, const Greeting& mine);

Proof prove(const Access& access, End end, const Greeting& connects, const Greeting& accepts);
bool equal(const Proof& a, const Proof& b);  // in constant time

// The rank in a greeting by which the accepting end refuses the connecting one.
inline constexpr std::int32_t kRefused = -2;

// The whole handshake at the connecting end; returns the other end's greeting. Throws ClusterError saying what is wrong
// with the other end, and DeadlineExceeded.
Greeting introduce(const FileDescriptor& socket, const Access& access, const Greeting& who, Deadline deadline);

// What is wrong with who has connected, besides what problem_with finds; empty where nothing is.
using Refuse = std::function<std::string(const Greeting&)>;

// The accepting end, which advances as bytes arrive. Used by one thread.
class AcceptingEnd {
 public:
  explicit AcceptingEnd(FileDescriptor socket) : socket_(std::move(socket)) {}

  // Reads what has arrived and does not wait; true once the other end has proved that it belongs to the job. Throws
  // ClusterError saying what is wrong with it.
  bool advance(const Access& access, const Greeting& who, const Refuse& refuse);

  bool has_greeted() const { return has_greeted_; }
  bool has_sent() const { return has_greeted_ || !received_.empty(); }  // anything
  std::chrono::duration<double> age() const { return since_.waited(); }
  const Greeting& theirs() const { return theirs_; }
  const FileDescriptor& socket() const { return socket_; }
  FileDescriptor take_socket() { return std::move(socket_); }

 private:
  bool receive(std::span<std::byte> value);
  void answer(const Access& access, const Greeting& who, const Refuse& refuse);

  FileDescriptor socket_;
  Deadline since_ = Deadline::never();
  std::vector<std::byte> received_;  // bytes of an incomplete value
  bool has_greeted_ = false;
  Greeting theirs_;
  Proof expected_{};
};

}  // namespace lockstep::transport
