// How the two ends of a connection learn who the other is, and that it belongs to the job.
//
//   the end that connects      the end that accepts
//   Greeting               ->
//                          <-  Greeting, Proof
//   Proof                  ->
//
// A proof is the HMAC-SHA-256, under the job's token, of a word for the end that makes it and of both greetings: so it
// is of this connection alone, and cannot be sent back to the end that made it. Without a token the key is empty.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include "base/file_descriptor.h"
#include "lockstep/access.h"
#include "lockstep/deadline.h"

namespace lockstep {

struct Greeting {
  std::array<char, 4> magic{'L', 'C', 'K', 'S'};
  std::uint32_t version = 2;
  std::array<char, 8> protocol{};  // what is spoken afterwards
  std::array<char, 32> group{};    // whose connection it is
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
bool equal(const Proof& a, const Proof& b);  // in the same time, whatever they are

// What a greeting has in the place of its rank where the end that accepts does not expect the one that connects.
inline constexpr std::int32_t kRefused = -2;

// The whole of it, at either end; returns who is at the other. `refuse` says what else is wrong with who has connected.
// Both throw ClusterError saying what is wrong with the other end, and DeadlineExceeded. `to_prove`: how long an end
// that has greeted well has, where that is later.
using Refuse = std::function<std::string(const Greeting&)>;
Greeting introduce(const FileDescriptor& socket, const Access& access, const Greeting& who, Deadline deadline);
Greeting welcome(const FileDescriptor& socket, const Access& access, const Greeting& who, const Refuse& refuse,
                 Deadline deadline, std::chrono::seconds to_prove);

}  // namespace lockstep
