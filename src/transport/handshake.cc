#include "transport/handshake.h"

#include <sodium.h>

#include <algorithm>

#include "base/text.h"
#include "lockstep/error.h"
#include "transport/socket.h"

namespace lockstep {
namespace {

static_assert(sizeof(Proof) == crypto_auth_hmacsha256_BYTES);

constexpr const char* kNoProof =
    "it cannot prove that it belongs to this job: its token is another (LOCKSTEP_TOKEN_FILE)";

void add(crypto_auth_hmacsha256_state& state, const void* bytes, std::size_t count) {
  crypto_auth_hmacsha256_update(&state, static_cast<const unsigned char*>(bytes), count);
}

std::string name_of(const Greeting& greeting) {
  return {greeting.protocol.begin(), std::find(greeting.protocol.begin(), greeting.protocol.end(), '\0')};
}

}  // namespace

Greeting fresh(Greeting greeting) {
  if (sodium_init() < 0) throw ClusterError("the system has no random numbers");
  randombytes_buf(greeting.random.data(), greeting.random.size());
  return greeting;
}

std::string problem_with(const Greeting& theirs, const Greeting& mine) {
  if (theirs.magic != mine.magic) return "it does not speak Lockstep's protocol";
  if (theirs.version != mine.version) {
    return text("it speaks version ", theirs.version, " of the protocol, this process version ", mine.version);
  }
  if (theirs.protocol != mine.protocol) return text("it speaks of ", name_of(theirs), ", not of ", name_of(mine));
  if (theirs.group != mine.group) return "it belongs to another group";
  if (theirs.generation != mine.generation) {
    return text("it is of generation ", theirs.generation, ", this process of ", mine.generation);
  }
  return "";
}

Proof prove(const Access& access, End end, const Greeting& connects, const Greeting& accepts) {
  crypto_auth_hmacsha256_state state;
  const auto* const key = reinterpret_cast<const unsigned char*>(access.token.data());
  crypto_auth_hmacsha256_init(&state, key, access.token.size());
  const char who = end == End::connects ? 'c' : 'a';
  add(state, &who, sizeof who);
  add(state, &connects, sizeof connects);
  add(state, &accepts, sizeof accepts);
  Proof proof;
  crypto_auth_hmacsha256_final(&state, proof.data());
  return proof;
}

bool equal(const Proof& a, const Proof& b) { return sodium_memcmp(a.data(), b.data(), a.size()) == 0; }

Greeting introduce(const FileDescriptor& socket, const Access& access, const Greeting& who, Deadline deadline) {
  const auto mine = fresh(who);
  write_value(socket, mine, deadline);
  const auto theirs = read_value<Greeting>(socket, deadline);
  const auto problem = problem_with(theirs, mine);
  if (!problem.empty()) throw ClusterError(problem);
  if (theirs.rank == kRefused) throw ClusterError("it does not expect this process, or has met one in its place");
  const auto proof = read_value<Proof>(socket, deadline);
  if (!equal(proof, prove(access, End::accepts, mine, theirs))) throw ClusterError(kNoProof);
  write_value(socket, prove(access, End::connects, mine, theirs), deadline);
  return theirs;
}

Greeting welcome(const FileDescriptor& socket, const Access& access, const Greeting& who, const Refuse& refuse,
                 Deadline deadline, std::chrono::seconds to_prove) {
  auto mine = fresh(who);
  const auto theirs = read_value<Greeting>(socket, deadline);
  auto problem = problem_with(theirs, mine);
  if (theirs.group != mine.group) mine.group = {};  // its name is for those who know it
  if (problem.empty()) problem = refuse(theirs);
  if (!problem.empty()) mine.rank = kRefused;
  if (theirs.magic == mine.magic) {
    write_value(socket, mine, deadline);
    write_value(socket, prove(access, End::accepts, theirs, mine), deadline);
  }
  if (!problem.empty()) throw ClusterError(problem);
  const auto proof = read_value<Proof>(socket, Deadline::after(to_prove));
  if (!equal(proof, prove(access, End::connects, theirs, mine))) throw ClusterError(kNoProof);
  return theirs;
}

}  // namespace lockstep
