#include "transport/handshake.h"

#include <sodium.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::transport {
namespace {

static_assert(sizeof(Proof) == crypto_auth_hmacsha256_BYTES);

constexpr const char* kNoProof =
    "it cannot prove that it belongs to this job: its token is another (LOCKSTEP_TOKEN_FILE, or ~/.lockstep/token "
    "where "
    "that is not set)";

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

bool AcceptingEnd::advance(const Access& access, const Greeting& who, const Refuse& refuse) {
  if (!has_greeted_) {
    if (!receive(std::as_writable_bytes(std::span(&theirs_, 1)))) return false;
    has_greeted_ = true;
    answer(access, who, refuse);
  }
  Proof proof;
  if (!receive(std::as_writable_bytes(std::span(proof)))) return false;
  if (!equal(proof, expected_)) throw ClusterError(kNoProof);
  return true;
}

bool AcceptingEnd::receive(std::span<std::byte> value) {
  const auto before = received_.size();
  received_.resize(value.size());
  const auto count = recv(socket_.get(), received_.data() + before, value.size() - before, 0);
  received_.resize(before + static_cast<std::size_t>(std::max<ssize_t>(0, count)));
  if (count == 0) throw ClusterError("a connection was closed by the other side");
  if (count < 0 && errno != EAGAIN && errno != EINTR) {
    throw ClusterError(text("a connection broke: ", std::strerror(errno)));
  }
  if (received_.size() < value.size()) return false;
  std::copy(received_.begin(), received_.end(), value.begin());
  received_.clear();
  return true;
}

// The answer fits into any socket's buffer, so that a peer that does not read cannot block this thread.
void AcceptingEnd::answer(const Access& access, const Greeting& who, const Refuse& refuse) {
  auto mine = fresh(who);
  auto problem = problem_with(theirs_, mine);
  if (theirs_.group != mine.group) mine.group = {};  // only those that know the group's name may see it
  if (problem.empty()) problem = refuse(theirs_);
  if (!problem.empty()) mine.rank = kRefused;
  expected_ = prove(access, End::connects, theirs_, mine);
  if (theirs_.magic == mine.magic) {
    const auto now = Deadline::after(std::chrono::seconds(0));
    write_value(socket_, mine, now);
    write_value(socket_, prove(access, End::accepts, theirs_, mine), now);
  }
  if (!problem.empty()) throw ClusterError(problem);
}

}  // namespace lockstep::transport
