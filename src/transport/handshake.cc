#include "transport/handshake.h"

#include <poll.h>
#include <sodium.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::transport {

namespace {

static_assert(sizeof(Proof) == crypto_auth_hmacsha256_BYTES);

constexpr const char* kNoProof =
    "it cannot prove that it belongs to this job: its token is another (LOCKSTEP_TOKEN_FILE, or ~/.lockstep/token "
    "where that is not set), or another process relays a connection to a loopback address from another host or network "
    "namespace";

// Each kind of proof begins with a letter of its own, so that no proof can stand for another.
constexpr char kOpening = 'o', kConnects = 'c', kAccepts = 'a', kNumber = 'n';
constexpr char kKeyOfConnects = 'C', kKeyOfAccepts = 'A';

// The connecting end sends this after its greeting.
struct Opening {
  SocketAddress dialled;
  Proof proof;
};
static_assert(sizeof(Opening) == sizeof(SocketAddress) + sizeof(Proof));

const unsigned char* raw(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }
unsigned char* raw(std::string& text) { return reinterpret_cast<unsigned char*>(text.data()); }

template <class T>
std::string_view bytes_of(const T& value) {
  static_assert(std::has_unique_object_representations_v<T>);
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// The proof of these bytes, one part after the other, under the job's token.
Proof authenticate(const Access& access, char letter, std::initializer_list<std::string_view> parts) {
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, raw(access.token), access.token.size());
  crypto_auth_hmacsha256_update(&state, raw(bytes_of(letter)), sizeof letter);
  for (const auto part : parts) crypto_auth_hmacsha256_update(&state, raw(part), part.size());
  Proof proof;
  crypto_auth_hmacsha256_final(&state, proof.data());
  return proof;
}

Proof authenticate(const Access& access, char letter, const Handshake& handshake) {
  const auto& [connects, dialled, accepts] = handshake;
  return authenticate(access, letter, {bytes_of(connects), bytes_of(dialled), bytes_of(accepts)});
}

// Reads what has arrived for the value and does not wait; true once the value is whole. `arrived`: its bytes so far.
// Throws ConnectionClosed and ClusterError.
template <class T>
bool receive(const FileDescriptor& socket, std::vector<std::byte>& arrived, T& value) {
  const auto before = arrived.size();
  arrived.resize(sizeof value);
  const auto count = recv(socket.get(), arrived.data() + before, sizeof value - before, 0);
  const auto error = errno;
  arrived.resize(before + static_cast<std::size_t>(std::max<ssize_t>(0, count)));
  if (count == 0) throw ConnectionClosed();
  if (count < 0) {
    if (error != EAGAIN && error != EINTR) throw_broken(error);
    return false;
  }
  if (arrived.size() < sizeof value) return false;
  std::memcpy(&value, arrived.data(), sizeof value);
  arrived.clear();
  return true;
}

std::string name_of(const Greeting& greeting) {
  return {greeting.protocol.begin(), std::find(greeting.protocol.begin(), greeting.protocol.end(), '\0')};
}

std::string elsewhere(const SocketAddress& dialled, const std::string& accepted, Bound bound) {
  const auto* const reason =
      bound == Bound::to_address
          ? "the network between the two hosts translates addresses (NAT, a published port of a container), which "
            "connections between ranks and to parameter servers do not allow"
          : "the network between the two hosts translates ports, or only one of the two addresses is a loopback "
            "address, which connections to the store do not allow";
  return text("the connection to ", print(dialled), " was accepted at ", accepted, ": another process relays it, or ",
              reason);
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

bool is_bound(const SocketAddress& dialled, const SocketAddress& accepted, Bound bound) {
  if (dialled == accepted) return true;
  return bound == Bound::to_port && dialled.port == accepted.port && !is_loopback(dialled) && !is_loopback(accepted);
}

Proof prove_opening(const Access& access, const Greeting& connects, const SocketAddress& dialled) {
  // Every host has loopback addresses. Without a token they prove nothing.
  const auto network = !access.token.empty() && is_loopback(dialled) ? this_network() : "";
  return authenticate(access, kOpening, {bytes_of(connects), bytes_of(dialled), network});
}

Proof prove(const Access& access, End end, const Handshake& handshake) {
  return authenticate(access, end == End::connects ? kConnects : kAccepts, handshake);
}

SessionKeys session_keys(const Access& access, const Handshake& handshake) {
  return {.connects = authenticate(access, kKeyOfConnects, handshake),
          .accepts = authenticate(access, kKeyOfAccepts, handshake)};
}

std::uint64_t secret_number(const Access& access, const std::string& name) {
  const auto bytes = authenticate(access, kNumber, {name});
  std::uint64_t number = 0;
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

bool equal(const Proof& a, const Proof& b) { return sodium_memcmp(a.data(), b.data(), a.size()) == 0; }

// The greeting and the opening fit into any socket's buffer, so writing does not wait.
ConnectingEnd::ConnectingEnd(const FileDescriptor& socket, const Access& access, const Greeting& who)
    : socket_(socket), access_(access) {
  handshake_.connects = fresh(who);
  handshake_.dialled = other_end_of(socket);
  const Opening opening{handshake_.dialled, prove_opening(access, handshake_.connects, handshake_.dialled)};
  std::array<std::byte, sizeof(Greeting) + sizeof(Opening)> bytes;
  std::memcpy(bytes.data(), &handshake_.connects, sizeof(Greeting));
  std::memcpy(bytes.data() + sizeof(Greeting), &opening, sizeof(Opening));
  write_all(socket, bytes, Deadline::after(std::chrono::seconds(0)));
}

bool ConnectingEnd::advance() {
  auto& theirs = handshake_.accepts;
  if (!has_greeting_) {
    if (!receive(socket_, arrived_, theirs)) return false;
    has_greeting_ = true;
    const auto problem = problem_with(theirs, handshake_.connects);
    if (!problem.empty()) throw ClusterError(problem);
    if (theirs.rank == kRefused)
      throw ClusterError("it does not expect this process, or is already connected to one of this rank");
    if (theirs.rank == kElsewhere || theirs.rank == kAtOtherPort) {
      const auto bound = theirs.rank == kElsewhere ? Bound::to_address : Bound::to_port;
      throw ClusterError(elsewhere(handshake_.dialled, "another address", bound));
    }
  }
  Proof proof;
  if (!receive(socket_, arrived_, proof)) return false;
  if (!equal(proof, prove(access_, End::accepts, handshake_))) throw ClusterError(kNoProof);
  write_value(socket_, prove(access_, End::connects, handshake_), Deadline::after(std::chrono::seconds(0)));
  return true;
}

ConnectingEnd introduce(const FileDescriptor& socket, const Access& access, const Greeting& who, Deadline deadline) {
  ConnectingEnd end(socket, access, who);
  while (!end.advance()) {
    if (!wait_for_events(socket.get(), POLLIN, deadline)) {
      throw DeadlineExceeded("reading from a connection", deadline.waited());
    }
  }
  return end;
}

Connection connect_proved(const std::string& address, const Access& access, const Greeting& who, Deadline deadline,
                          std::chrono::duration<double> attempt) {
  constexpr std::chrono::milliseconds kBetweenTries(20);
  while (true) {
    auto socket = connect_to(address, deadline);
    const auto by = Deadline::after(attempt);
    try {
      const auto end = introduce(socket, access, who, by.time() < deadline.time() ? by : deadline);
      return {std::move(socket), end.theirs(), end.keys()};
    } catch (const ConnectionClosed&) {
      if (deadline.passed()) throw;
    } catch (const DeadlineExceeded&) {
      constexpr const char* kSilent = " (who answers there is silent)";
      if (deadline.passed()) throw DeadlineExceeded(text("connecting to ", address), deadline.waited(), {}, kSilent);
    }
    std::this_thread::sleep_for(kBetweenTries);
  }
}

std::optional<std::size_t> first_that_proves(std::span<const std::string> addresses, const Access& access,
                                             const Greeting& who, Deadline deadline, std::string& problem) {
  std::vector<FileDescriptor> sockets;
  std::vector<std::unique_ptr<ConnectingEnd>> ends(addresses.size());  // null while the connection is being made
  for (const auto& address : addresses) sockets.push_back(begin_to_connect(address));
  const auto note = [&](std::size_t i, const std::string& what) { problem = text(addresses[i], ": ", what); };
  const auto advance = [&](std::size_t i) {
    if (ends[i]) return ends[i]->advance();
    if (error_of(sockets[i]) == 0) {
      ends[i] = std::make_unique<ConnectingEnd>(sockets[i], access, who);
    } else {
      sockets[i] = {};  // nobody answers there
    }
    return false;
  };
  const auto open = [](const auto& socket) { return socket.open(); };
  while (std::any_of(sockets.begin(), sockets.end(), open)) {
    std::vector<pollfd> polls;
    for (std::size_t i = 0; i < sockets.size(); ++i)
      polls.push_back({sockets[i].get(), static_cast<short>(ends[i] ? POLLIN : POLLOUT), 0});
    poll(polls.data(), polls.size(), milliseconds_to(deadline));
    for (std::size_t i = 0; i < polls.size(); ++i) {
      try {
        if (polls[i].revents != 0 && advance(i)) return i;
      } catch (const ClusterError& error) {
        note(i, error.what());
        ends[i] = nullptr;
        sockets[i] = {};
      }
    }
    if (deadline.passed()) break;
  }
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (ends[i]) note(i, "who answers there is silent");
  }
  return std::nullopt;
}

bool AcceptingEnd::advance(const Access& access, const Greeting& who, const Refuse& refuse) {
  auto& theirs = handshake_.connects;
  if (!has_greeted_) {
    if (!receive(socket_, arrived_, theirs)) return false;
    has_greeted_ = true;
    // Ends of another version may send something else after their greeting.
    if (theirs.magic != who.magic || theirs.version != who.version)
      answer(access, fresh(who), problem_with(theirs, who));
  }
  if (!has_opened_) {
    Opening opening;
    if (!receive(socket_, arrived_, opening)) return false;
    handshake_.dialled = opening.dialled;
    auto mine = fresh(who);
    if (!equal(opening.proof, prove_opening(access, theirs, opening.dialled))) answer(access, mine, kNoProof);
    has_opened_ = true;
    auto problem = problem_with(theirs, mine);
    const auto here = own_end_of(socket_);
    // Without a token anybody can make an opening, so that the address proves nothing.
    if (problem.empty() && !access.token.empty() && !is_bound(opening.dialled, here, bound_)) {
      mine.rank = bound_ == Bound::to_address ? kElsewhere : kAtOtherPort;
      problem = elsewhere(opening.dialled, print(here), bound_);
    }
    if (problem.empty()) {
      problem = refuse(theirs);
      if (!problem.empty()) mine.rank = kRefused;
    }
    answer(access, mine, problem);
  }
  Proof proof;
  if (!receive(socket_, arrived_, proof)) return false;
  if (!equal(proof, prove(access, End::connects, handshake_))) throw ClusterError(kNoProof);
  return true;
}

// Throws where there is a problem, once the other end was told. The answer fits into any socket's buffer, so that a
// peer that does not read cannot block this thread. Nothing is proved to an end that has not proved its opening.
void AcceptingEnd::answer(const Access& access, Greeting mine, const std::string& problem) {
  if (handshake_.connects.group != mine.group) mine.group = {};  // only those that know the group's name may see it
  handshake_.accepts = mine;
  if (handshake_.connects.magic == mine.magic) {
    const auto now = Deadline::after(std::chrono::seconds(0));
    write_value(socket_, mine, now);
    write_value(socket_, has_opened_ ? prove(access, End::accepts, handshake_) : Proof{}, now);
  }
  if (!problem.empty()) throw ClusterError(problem);
}

namespace {

static_assert(sizeof(Proof) == crypto_aead_chacha20poly1305_IETF_KEYBYTES);
static_assert(Seal::kTag == crypto_aead_chacha20poly1305_IETF_ABYTES);

using Nonce = std::array<unsigned char, crypto_aead_chacha20poly1305_IETF_NPUBBYTES>;

Nonce nonce_of(std::uint64_t number) {
  Nonce nonce{};
  std::memcpy(nonce.data(), &number, sizeof number);
  return nonce;
}

}  // namespace

Seal::Seal(const SessionKeys& keys, End end)
    : to_send_(end == End::connects ? keys.connects : keys.accepts),
      to_receive_(end == End::connects ? keys.accepts : keys.connects) {}

std::string Seal::close(std::string_view message) {
  const auto length = static_cast<std::uint32_t>(message.size() + kTag);
  std::string sealed(sizeof length + length, '\0');
  std::memcpy(sealed.data(), &length, sizeof length);
  crypto_aead_chacha20poly1305_ietf_encrypt(raw(sealed) + sizeof length, nullptr, raw(message), message.size(), nullptr,
                                            0, nullptr, nonce_of(sent_++).data(), to_send_.data());
  return sealed;
}

std::string Seal::open(std::string_view sealed) {
  std::string message(sealed.size() < kTag ? 0 : sealed.size() - kTag, '\0');
  if (sealed.size() < kTag ||
      crypto_aead_chacha20poly1305_ietf_decrypt(raw(message), nullptr, nullptr, raw(sealed), sealed.size(), nullptr, 0,
                                                nonce_of(received_++).data(), to_receive_.data()) != 0) {
    throw ClusterError("what came over a connection is not what the other side has sent");
  }
  return message;
}

}  // namespace lockstep::transport
