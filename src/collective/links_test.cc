// Properties of links between hosts.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <atomic>
#include <filesystem>

#include "collective/ranks_testing.h"

namespace lockstep::collective {
namespace {

// A host that lost its power says nothing: the system asks after it, and ends connections within about a minute.
TEST(Links, ThatSayNothingAreAskedAfter) {
  std::atomic<int> asked = 0;
  const auto look = [&](const Group& group) {
    group.barrier(soon());
    if (group.rank() != 0) return group.barrier(soon());
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      const int socket = std::stoi(entry.path().filename());
      const auto option = [socket](int level, int name, int value = 0, socklen_t size = sizeof(int)) {
        return ::getsockopt(socket, level, name, &value, &size) == 0 ? value : 0;
      };
      if (option(SOL_SOCKET, SO_KEEPALIVE) == 0) continue;
      EXPECT_LE(
          option(IPPROTO_TCP, TCP_KEEPIDLE) + option(IPPROTO_TCP, TCP_KEEPINTVL) * option(IPPROTO_TCP, TCP_KEEPCNT),
          60);
      EXPECT_LE(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 60'000);
      EXPECT_GT(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 0);
      ++asked;
    }
    group.barrier(soon());
  };
  expect_no_errors(run_ranks({.size = 3, .group = {.backend = "tcp"}, .ranks_per_host = 1}, look));
  EXPECT_GE(asked, 6) << "both ends of the links between three ranks, which are threads here";
}

}  // namespace
}  // namespace lockstep::collective
