// Whom a full acceptor turns away, and when.
#include "transport/acceptor.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>

#include "transport/socket.h"

namespace lockstep::transport {
namespace {

bool was_turned_away(const FileDescriptor& socket) {
  char byte = 0;
  return recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 0;
}

// A process of the job may be slow, and only needs its place where another connection waits for that.
TEST(Acceptor, AFullOneTurnsNoneAwayWhereNoneWaits) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{128, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const auto listener = listen_at("127.0.0.1:0", {});
  Acceptor acceptor(listener, {.token = std::string(32, 't')}, {}, [](const Greeting&) { return ""; });
  const auto advance_for_a_while = [&] {
    for (const auto end = Deadline::after(std::chrono::milliseconds(250)); !end.passed();) {
      std::vector<pollfd> polls;
      acceptor.watch(polls);
      poll(polls.data(), polls.size(), 10);
      acceptor.advance(polls);
    }
  };
  std::vector<FileDescriptor> silent;
  const auto come = [&] {
    silent.push_back(connect_to(local_address(listener), Deadline::after(std::chrono::seconds(20))));
  };
  while (silent.size() < most_that_prove()) come();
  advance_for_a_while();
  EXPECT_EQ(std::count_if(silent.begin(), silent.end(), was_turned_away), 0);
  come();
  advance_for_a_while();
  EXPECT_TRUE(was_turned_away(silent[0]));
  EXPECT_EQ(std::count_if(silent.begin(), silent.end(), was_turned_away), 1);
  setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace lockstep::transport
