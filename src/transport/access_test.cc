// Who gets in: token files, and the two ends of a connection.
#include "lockstep/transport/access.h"
#include "base/expect_says_testing.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <thread>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/handshake.h"
#include "transport/socket.h"

namespace lockstep::transport {
namespace {

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

class AccessFile : public testing::Test {
 protected:
  AccessFile() {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
    path_ = folder_ + "/token";
  }
  ~AccessFile() override { std::filesystem::remove_all(folder_); }

  // A file with this content and mode.
  Access read(const std::string& content, mode_t mode = 0600) {
    std::ofstream(path_) << content;
    chmod(path_.c_str(), mode);
    return access_with({{kTokenFileVariable, path_}});
  }

  static Access access_with(const std::map<std::string, std::string>& variables) {
    return access_of([&](const char* name) {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
  }

  std::string folder_ = "/tmp/lockstep-access-XXXXXX", path_;
};

TEST_F(AccessFile, HasSixtyFourDigitsForItsOwnerAlone) {
  std::string digits, bytes;
  for (int i = 0; i < 32; ++i) {
    digits += text("0123456789abcdef"[i / 2], "fedcba9876543210"[i % 16]);
    bytes += static_cast<char>(i / 2 * 16 + 15 - i % 16);
  }
  EXPECT_EQ(read(digits + "\n").token, bytes);
  EXPECT_EQ(read(digits, 0400).token, bytes);
  EXPECT_FALSE(read(digits).trusted_network);
  for (const mode_t mode : {0640, 0604, 0666, 0610}) {
    expect_says(message_of<ClusterError>([&] { read(digits, mode); }),
                "may be read by others than its owner; chmod 600 " + path_);
  }
  for (const auto& bad : {std::string(), digits.substr(1), digits + "0", digits + digits, std::string(64, 'g'),
                          "0x" + digits.substr(2), digits.substr(0, 32) + "\n" + digits.substr(32)}) {
    expect_says(message_of<ClusterError>([&] { read(bad); }),
                path_ + " has no token; it must hold 64 hexadecimal digits");
  }
  expect_says(message_of<ClusterError>([&] {
                access_with({{kTokenFileVariable, folder_ + "/none"}});
              }),
              "LOCKSTEP_TOKEN_FILE: " + folder_ + "/none cannot be read: No such file");
  expect_says(message_of<ClusterError>([&] { access_with({{kTokenFileVariable, folder_}}); }), folder_);
}

TEST_F(AccessFile, WithoutOneNothingIsTrustedUnlessSaid) {
  EXPECT_EQ(access_with({}).token, "");
  EXPECT_FALSE(access_with({}).trusted_network);
  EXPECT_FALSE(access_with({{kTrustedNetworkVariable, "0"}}).trusted_network);
  EXPECT_TRUE(access_with({{kTrustedNetworkVariable, "1"}}).trusted_network);
  expect_says(message_of<ClusterError>([] {
                access_with({{kTrustedNetworkVariable, "yes"}});
              }),
              "LOCKSTEP_TRUSTED_NETWORK is \"yes\"; it must be 0 or 1");
}

TEST(Listening, LoopbackIsAnAddressAndNotTheBeginningOfAName) {
  for (const auto* host : {"127.0.0.1", "127.255.0.1", "::1", "localhost"}) EXPECT_TRUE(is_loopback(host)) << host;
  for (const auto* host : {"127.0.0.1x", "127.example.org", "128.0.0.1", "0.0.0.0", "::2", "fe80::1", "host"}) {
    EXPECT_FALSE(is_loopback(host)) << host;
  }
}

TEST(Listening, AtOtherThanLoopbackNeedsATokenOrTrust) {
  for (const auto* address : {"127.0.0.1:0", "127.1.2.3:0", "localhost:0", "[::1]:0"}) listen_at(address, {});
  for (const auto* address : {"0.0.0.0:0", "[::]:0"}) {
    expect_says(message_of<ClusterError>([&] { listen_at(address, {}); }),
                text("listening at ", address, " needs a token"));
    listen_at(address, {.token = std::string(32, 't')});
    listen_at(address, {.trusted_network = true});
  }
}

// What each end of a connection says of the other: empty, or what was thrown.
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
        message_of<ClusterError>([&] { EXPECT_EQ(introduce(socket, connecting, connects, soon()).rank, 0); });
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
    expect_says(said.accepting, "closed by the other side");
  }
}

TEST(Handshake, WhatDiffersIsNamed) {
  const auto problem = [](Greeting theirs) { return problem_with(theirs, {}); };
  EXPECT_EQ(problem({}), "");
  EXPECT_EQ(problem({.magic = {'H', 'T', 'T', 'P'}}), "it does not speak Lockstep's protocol");
  EXPECT_EQ(problem({.version = 9}), "it speaks version 9 of the protocol, this process version 2");
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
  EXPECT_EQ(refused.connecting, "it does not expect this process, or has met one in its place");
  EXPECT_EQ(refused.accepting, "it says that it is rank 1");
}

// A proof is of both greetings, and of the end that makes it: nothing that was heard can be used again.
TEST(Handshake, AProofIsOfOneConnectionAlone) {
  const auto connects = fresh({.rank = 1}), accepts = fresh({.rank = 0});
  EXPECT_NE(connects.random, accepts.random);
  const auto proof = prove(kOurs, End::connects, connects, accepts);
  EXPECT_TRUE(equal(proof, prove(kOurs, End::connects, connects, accepts)));
  EXPECT_FALSE(equal(proof, prove(kOurs, End::accepts, connects, accepts)));
  EXPECT_FALSE(equal(proof, prove(kOurs, End::connects, accepts, connects)));
  for (std::size_t byte = 0; byte < sizeof(Greeting); ++byte) {
    auto changed = connects;
    reinterpret_cast<unsigned char*>(&changed)[byte] ^= 1;
    EXPECT_FALSE(equal(proof, prove(kOurs, End::connects, changed, accepts))) << byte;
    changed = accepts;
    reinterpret_cast<unsigned char*>(&changed)[byte] ^= 1;
    EXPECT_FALSE(equal(proof, prove(kOurs, End::connects, connects, changed))) << byte;
  }
}

}  // namespace
}  // namespace lockstep::transport
