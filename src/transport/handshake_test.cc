// The two ends of a connection: what each proves to the other, and to whom nothing is proved.
#include "transport/handshake.h"
#include "lockstep/transport/access.h"

#include <gtest/gtest.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "lockstep/base/error.h"
#include "transport/acceptor.h"
#include "transport/socket.h"

namespace lockstep::transport {
namespace {

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

// The text of what each end of a connection threw; empty where it threw nothing.
struct Ends {
  std::string connecting, accepting;
};

const Access kOurs{.token = std::string(32, 'o')};

Ends shake_hands(const Access& connecting, const Access& accepting, const Greeting& connects = {.rank = 1},
                 const std::string& refusal = "") {
  const auto listener = listen_at("127.0.0.1:0", {});
  Ends said;
  std::jthread other([&] {
    AcceptingEnd end(accept_from(listener, soon()));
    const Refuse refuse = [&](const Greeting&) { return refusal; };
    said.accepting = message_of<ClusterError>([&] {
      while (!end.advance(accepting, {.rank = 0}, refuse)) wait_for_events(end.socket().get(), POLLIN, soon());
      EXPECT_EQ(end.theirs().rank, connects.rank);
    });
  });
  {
    const auto socket = connect_to(local_address(listener), soon());
    said.connecting =
        message_of<ClusterError>([&] { EXPECT_EQ(introduce(socket, connecting, connects, soon()).theirs().rank, 0); });
  }
  other.join();
  return said;
}

TEST(Handshake, EndsWithOneTokenMeet) {
  for (const auto& access : {kOurs, Access{}}) {
    const auto said = shake_hands(access, access);
    EXPECT_EQ(said.connecting, "nothing was thrown");
    EXPECT_EQ(said.accepting, "nothing was thrown");
  }
}

TEST(Handshake, AnotherTokenOrNoneIsTurnedAway) {
  const Access others{.token = std::string(32, 'p')};
  for (const auto& [connecting, accepting] : {std::pair(kOurs, others), {Access{}, kOurs}, {kOurs, Access{}}}) {
    const auto said = shake_hands(connecting, accepting);
    expect_says(said.connecting, "its token is another (LOCKSTEP_TOKEN_FILE");
    expect_says(said.accepting, "its token is another (LOCKSTEP_TOKEN_FILE");
  }
}

TEST(Handshake, WhatDiffersIsNamed) {
  const auto problem = [](Greeting theirs) { return problem_with(theirs, {}); };
  EXPECT_EQ(problem({}), "");
  EXPECT_EQ(problem({.magic = {'H', 'T', 'T', 'P'}}), "it does not speak Lockstep's protocol");
  EXPECT_EQ(problem({.version = 9}), "it speaks version 9 of the protocol, this process version 4");
  EXPECT_EQ(problem({.protocol = {'a'}}), "it speaks of a, not of ");
  EXPECT_EQ(problem({.group = {'a'}}), "it belongs to another group");
  EXPECT_EQ(problem({.generation = 3}), "it is of generation 3, this process of 0");
}

// Each end hears what is wrong, and the name of the group is not for those who do not know it.
TEST(Handshake, BothEndsHearWhatDiffers) {
  const auto group = shake_hands(kOurs, kOurs, {.group = {'a'}, .rank = 1});
  EXPECT_EQ(group.connecting, "it belongs to another group");
  EXPECT_EQ(group.accepting, "it belongs to another group");
  const auto generation = shake_hands(kOurs, kOurs, {.generation = 3, .rank = 1});
  EXPECT_EQ(generation.connecting, "it is of generation 0, this process of 3");
  EXPECT_EQ(generation.accepting, "it is of generation 3, this process of 0");
  const auto refused = shake_hands(kOurs, kOurs, {.rank = 1}, "it says that it is rank 1");
  EXPECT_EQ(refused.connecting, "it does not expect this process, or is already connected to one of this rank");
  EXPECT_EQ(refused.accepting, "it says that it is rank 1");
}

// A proof is of both greetings, of the address that was dialled and of the end that proves. So nothing that a stranger
// heard can be used again.
TEST(Handshake, AProofIsOfOneConnectionAlone) {
  const Handshake whole{fresh({.rank = 1}), {.host = {1}, .port = 2}, fresh({.rank = 0})};
  EXPECT_NE(whole.connects.random, whole.accepts.random);
  const auto proof = prove(kOurs, End::connects, whole);
  EXPECT_TRUE(equal(proof, prove(kOurs, End::connects, whole)));
  EXPECT_FALSE(equal(proof, prove(kOurs, End::accepts, whole)));
  EXPECT_FALSE(equal(proof, prove(kOurs, End::connects, {whole.accepts, whole.dialled, whole.connects})));
  EXPECT_FALSE(equal(proof, prove_opening(kOurs, whole.connects, whole.dialled)));
  EXPECT_FALSE(equal(proof, session_keys(kOurs, whole).connects));
  EXPECT_FALSE(equal(session_keys(kOurs, whole).accepts, session_keys(kOurs, whole).connects));
  const auto changed = [&](auto Handshake::*part) {
    for (std::size_t byte = 0; byte < sizeof(whole.*part); ++byte) {
      auto other = whole;
      reinterpret_cast<unsigned char*>(&(other.*part))[byte] ^= 1;
      EXPECT_FALSE(equal(proof, prove(kOurs, End::connects, other))) << byte;
    }
  };
  changed(&Handshake::connects);
  changed(&Handshake::dialled);
  changed(&Handshake::accepts);
}

SocketAddress address(std::array<unsigned char, 4> v4, std::uint16_t port) {
  SocketAddress made{.port = port};
  made.host[10] = made.host[11] = 0xff;
  std::copy(v4.begin(), v4.end(), made.host.begin() + 12);
  return made;
}

TEST(Handshake, TheAddressThatWasDialledIsTheOneThatAccepts) {
  const auto here = address({127, 0, 0, 1}, 1), host = address({10, 0, 0, 1}, 1), other = address({10, 0, 0, 2}, 1);
  const auto other_port = address({10, 0, 0, 1}, 2);
  for (const auto bound : {Bound::to_address, Bound::to_port}) {
    EXPECT_TRUE(is_bound(here, here, bound));
    EXPECT_TRUE(is_bound(host, host, bound));
    EXPECT_FALSE(is_bound(host, other_port, bound));  // a relay on the same host
    EXPECT_FALSE(is_bound(host, here, bound));        // a relay to this host's loopback address
    EXPECT_FALSE(is_bound(here, host, bound));
    EXPECT_EQ(is_bound(host, other, bound), bound == Bound::to_port);  // a network that translates addresses
  }
}

// Sends on what arrives at either end, and keeps it, until one closes.
void relay(const FileDescriptor& one, const FileDescriptor& other, std::string& from_one) {
  const auto pass = [](const FileDescriptor& from, const FileDescriptor& to, std::string* kept) {
    std::array<char, 4096> bytes;
    const auto count = recv(from.get(), bytes.data(), bytes.size(), 0);
    if (count == 0 || (count < 0 && errno != EAGAIN)) return false;
    if (count < 0) return true;
    if (kept != nullptr) kept->append(bytes.data(), static_cast<std::size_t>(count));
    return send(to.get(), bytes.data(), static_cast<std::size_t>(count), MSG_NOSIGNAL) == count;
  };
  while (true) {
    std::array<pollfd, 2> polls{{{one.get(), POLLIN, 0}, {other.get(), POLLIN, 0}}};
    if (poll(polls.data(), polls.size(), 20'000) <= 0) return;
    if (polls[0].revents != 0 && !pass(one, other, &from_one)) return;
    if (polls[1].revents != 0 && !pass(other, one, nullptr)) return;
  }
}

// The end that accepts, in a thread of its own, and what it says of the next connection.
class Accepts {
 public:
  explicit Accepts(Access access) : access_(std::move(access)) {}
  std::string address() const { return local_address(listener_); }
  std::future<std::string> next() {
    return std::async(std::launch::async, [this] {
      AcceptingEnd end(accept_from(listener_, soon()));
      return message_of<ClusterError>([&] {
        while (!end.advance(access_, {}, [](const Greeting&) { return ""; })) {
          wait_for_events(end.socket().get(), POLLIN, soon());
        }
      });
    });
  }

 private:
  const FileDescriptor listener_ = listen_at("127.0.0.1:0", {});
  const Access access_;
};

// A stranger between the two ends that changes nothing.
TEST(Handshake, ARelayIsRefused) {
  Accepts real(kOurs);
  auto accepting = real.next();
  const auto front = listen_at("127.0.0.1:0", {});
  std::string heard;
  std::jthread stranger([&] {
    const auto one = accept_from(front, soon());
    relay(one, connect_to(real.address(), soon()), heard);
  });
  const auto socket = connect_to(local_address(front), soon());
  expect_says(message_of<ClusterError>([&] { introduce(socket, kOurs, {}, soon()); }),
              "the connection to " + local_address(front) + " was accepted at another address: another process relays");
  expect_says(accepting.get(), "the connection to " + local_address(front) + " was accepted at " + real.address());
}

// The stranger is in a network namespace of its own, at the same loopback address and port.
TEST(Handshake, ARelayBetweenLoopbackAddressesOfTwoNetworksIsRefused) {
  const auto front = listen_at("127.0.0.1:0", {});
  std::string heard;
  FileDescriptor to_real;  // the stranger's
  std::promise<void> is_there;
  auto accepting = std::async(std::launch::async, [&]() -> std::string {
    const auto listener = [&]() -> std::optional<FileDescriptor> {
      const FileDescriptor control(::unshare(CLONE_NEWNET) == 0 ? ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0) : -1);
      ifreq loopback{.ifr_ifrn = {.ifrn_name = "lo"}, .ifr_ifru = {.ifru_flags = IFF_UP}};
      if (ioctl(control.get(), SIOCSIFFLAGS, &loopback) != 0) return std::nullopt;
      auto made = listen_at(local_address(front), {});
      to_real = connect_to(local_address(made), soon());
      return made;
    }();
    is_there.set_value();
    if (!listener) return "there is no other network: only root can make one";
    AcceptingEnd end(accept_from(*listener, soon()));
    return message_of<ClusterError>([&] {
      while (!end.advance(kOurs, {}, [](const Greeting&) { return ""; })) {
        wait_for_events(end.socket().get(), POLLIN, soon());
      }
    });
  });
  is_there.get_future().wait();
  std::jthread stranger([&] { relay(accept_from(front, soon()), std::exchange(to_real, {}), heard); });
  const auto socket = connect_to(local_address(front), soon());
  for (const auto& said : {message_of<ClusterError>([&] { introduce(socket, kOurs, {}, soon()); }), accepting.get()})
    expect_says(said, "another process relays a connection to a loopback address from another host");
}

// A stranger that sends a process's own words back to it.
TEST(Handshake, AReflectedProofIsRefused) {
  const auto front = listen_at("127.0.0.1:0", {});
  std::jthread stranger([&] {
    const auto one = accept_from(front, soon());
    const auto greeting = read_value<Greeting>(one, soon());
    read_value<SocketAddress>(one, soon());
    const auto proof = read_value<Proof>(one, soon());
    write_value(one, greeting, soon());
    write_value(one, proof, soon());
    wait_for_events(one.get(), POLLIN, soon());
  });
  const auto socket = connect_to(local_address(front), soon());
  expect_says(message_of<ClusterError>([&] { introduce(socket, kOurs, {}, soon()); }), "cannot prove");
}

// All that a process of the job has said on a connection, said again by a stranger.
TEST(Handshake, AReplayIsRefused) {
  Accepts real(kOurs), other(kOurs);
  std::string heard;
  {
    auto accepting = real.next();
    const auto mine = connect_to(real.address(), soon());
    ConnectingEnd end(mine, kOurs, {});
    while (!end.advance()) wait_for_events(mine.get(), POLLIN, soon());
    EXPECT_EQ(accepting.get(), "nothing was thrown");
    Handshake whole{.connects = {}, .dialled = other_end_of(mine), .accepts = end.theirs()};
    const auto add = [&](const auto& value) { heard.append(reinterpret_cast<const char*>(&value), sizeof value); };
    whole.connects = end.mine();
    add(whole.connects);
    add(whole.dialled);
    add(prove_opening(kOurs, whole.connects, whole.dialled));
    add(prove(kOurs, End::connects, whole));
  }
  const auto replayed_to = [&](Accepts& end) {
    auto accepting = end.next();
    const auto stranger = connect_to(end.address(), soon());
    write_all(stranger, std::as_bytes(std::span(heard)), soon());
    return accepting.get();
  };
  expect_says(replayed_to(real), "it cannot prove");
  expect_says(replayed_to(other), "the connection to " + real.address() + " was accepted at " + other.address());
}

// A stranger has heard the opening of a process which is slow to prove.
TEST(Handshake, AnOpeningCountsOnce) {
  const auto listener = listen_at("127.0.0.1:0", {});
  Acceptor acceptor(listener, kOurs, {}, [](const Greeting&) { return ""; });
  std::jthread accepts(
      [&] { message_of<DeadlineExceeded>([&] { acceptor.next(Deadline::after(std::chrono::milliseconds(500))); }); });
  const auto address = local_address(listener);
  const auto mine = connect_to(address, soon()), stranger = connect_to(address, soon());
  const auto greeting = fresh({});
  const auto dialled = other_end_of(mine);
  const auto open = [&](const FileDescriptor& socket) {
    write_value(socket, greeting, soon());
    write_value(socket, dialled, soon());
    write_value(socket, prove_opening(kOurs, greeting, dialled), soon());
    return read_value<Greeting>(socket, soon()).rank;
  };
  EXPECT_EQ(open(mine), 0);
  EXPECT_EQ(open(stranger), kRefused);
}

// Without a token anybody can say any address: networks may translate them.
TEST(Handshake, WithoutATokenAddressesAreNotCompared) {
  Accepts real({.trusted_network = true});
  auto accepting = real.next();
  const auto front = listen_at("127.0.0.1:0", {});
  std::string heard;
  std::jthread translates([&] {
    const auto one = accept_from(front, soon());
    relay(one, connect_to(real.address(), soon()), heard);
  });
  {
    const auto socket = connect_to(local_address(front), soon());
    introduce(socket, {.trusted_network = true}, {}, soon());
    EXPECT_EQ(accepting.get(), "nothing was thrown");
  }
}

TEST(Handshake, ASilentStrangerIsLeftForAnotherAttempt) {
  const auto listener = listen_at("127.0.0.1:0", {});
  const std::chrono::milliseconds attempt(100);
  std::jthread other([&] {
    const auto silent = accept_from(listener, soon());
    AcceptingEnd end(accept_from(listener, soon()));
    while (!end.advance(kOurs, {}, [](const Greeting&) { return ""; })) {
      wait_for_events(end.socket().get(), POLLIN, soon());
    }
  });
  connect_proved(local_address(listener), kOurs, {}, soon(), attempt);
  other.join();
  expect_says(message_of<DeadlineExceeded>(
                  [&] { connect_proved(local_address(listener), kOurs, {}, Deadline::after(attempt), 2 * attempt); }),
              "(who answers there is silent)");
}

// One that was greeted by a process of the job, and knows no token, hears no proof that it could use.
TEST(Handshake, NothingIsProvedToAStranger) {
  Accepts real(kOurs);
  auto accepting = real.next();
  const auto stranger = connect_to(real.address(), soon());
  write_value(stranger, fresh({}), soon());
  write_value(stranger, other_end_of(stranger), soon());
  write_value(stranger, Proof{}, soon());
  read_value<Greeting>(stranger, soon());
  EXPECT_EQ(read_value<Proof>(stranger, soon()), Proof{});
  expect_says(accepting.get(), "it cannot prove");
}

// There are four addresses: one is silent, one is a stranger's, one is the job's, and nobody listens at the last.
TEST(Handshake, OfSeveralAddressesThatOfTheJobIsFound) {
  const auto silent = listen_at("127.0.0.1:0", {});
  Accepts stranger({.token = std::string(32, 's')}), real(kOurs);
  const std::vector<std::string> addresses{local_address(silent), stranger.address(), real.address(), "127.0.0.1:9"};
  auto one = stranger.next(), other = real.next();
  std::string problem;
  const auto begin = soon();
  EXPECT_EQ(first_that_proves(addresses, kOurs, {}, soon(), problem), 2U);
  EXPECT_LT(begin.waited().count(), 5);
  const auto none = std::span(addresses).first(1);
  EXPECT_EQ(first_that_proves(none, kOurs, {}, Deadline::after(std::chrono::milliseconds(50)), problem), std::nullopt);
  expect_says(problem, addresses[0] + ": who answers there is silent");
}

class Sealed : public testing::Test {
 protected:
  const SessionKeys keys_ = session_keys(kOurs, {fresh({}), {}, fresh({})});
  Seal connects_{keys_, End::connects}, accepts_{keys_, End::accepts};

  static std::string without_length(const std::string& closed) { return closed.substr(sizeof(std::uint32_t)); }
};

TEST_F(Sealed, MessagesArriveAsTheyWere) {
  for (const auto& message : {std::string(), std::string("one"), std::string(100'000, 'x')}) {
    EXPECT_EQ(accepts_.open(without_length(connects_.close(message))), message);
    EXPECT_EQ(connects_.open(without_length(accepts_.close(message))), message);
  }
}

TEST_F(Sealed, WhatWasChangedRepeatedOrSentBackIsRefused) {
  const auto refused = [](Seal end, const std::string& sealed) {
    return message_of<ClusterError>([&] { end.open(sealed); }) ==
           "what came over a connection is not what the other side has sent";
  };
  const auto first = without_length(connects_.close("127.0.0.1:4711")), second = without_length(connects_.close("2"));
  for (std::size_t byte = 0; byte < first.size(); ++byte) {
    auto changed = first;
    changed[byte] = static_cast<char>(changed[byte] ^ 1);
    EXPECT_TRUE(refused(accepts_, changed)) << byte;
  }
  EXPECT_EQ(first.find("4711"), std::string::npos);
  EXPECT_TRUE(refused(accepts_, second));  // the first was left out
  EXPECT_TRUE(refused(connects_, first));  // back to its maker
  EXPECT_TRUE(refused(accepts_, ""));
  accepts_.open(first);
  EXPECT_TRUE(refused(accepts_, first));
  EXPECT_TRUE(refused({session_keys(kOurs, {fresh({}), {}, fresh({})}), End::accepts}, first));  // another connection
}

}  // namespace
}  // namespace lockstep::transport
