// Who gets in: token files, and where a process listens.
#include "lockstep/transport/access.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/expect_says_testing.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::transport {
namespace {

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

}  // namespace
}  // namespace lockstep::transport
