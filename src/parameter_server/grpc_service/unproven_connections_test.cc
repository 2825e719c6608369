#include "parameter_server/grpc_service/unproven_connections.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <utility>

#include "base/text.h"
#include "transport/socket.h"

namespace lockstep::grpc_service {
namespace {

// Both ends of a connection over TCP.
struct Link {
  FileDescriptor stranger, server;
  std::string peer;  // as gRPC names the stranger's end

  static Link make(const FileDescriptor& listener, const std::string& host) {
    std::string problem;
    const auto listens = transport::local_address(listener);
    const auto address = host + listens.substr(listens.rfind(':'));
    Link link{transport::connect_once(address, Deadline::after(std::chrono::seconds(10)), problem),
              FileDescriptor(accept(listener.get(), nullptr, nullptr)), ""};
    auto name = transport::local_address(link.stranger);
    if (name.front() == '[')
      name = text("%5B", name.substr(1, name.find(']') - 1), "%5D", name.substr(name.find(']') + 1));
    link.peer = (name.front() == '%' ? "ipv6:" : "ipv4:") + name;
    return link;
  }
  bool is_ended() const {
    char byte = 0;
    return recv(stranger.get(), &byte, 1, MSG_DONTWAIT) == 0;
  }
};

void accept_into(UnprovenConnections& connections, const FileDescriptor& socket) {
  ASSERT_TRUE(connections.make_room());
  connections.add(socket);
}

// The parameters are the host at which the server listens, and the address that is dialled.
class Unproven : public testing::TestWithParam<std::pair<std::string, std::string>> {
 protected:
  Link link() const { return Link::make(listener_, GetParam().second); }

  const FileDescriptor listener_ = transport::listen_at(GetParam().first + ":0", {.token = std::string(32, 't')});
};

TEST_P(Unproven, ThoseThatProveMakeRoomAndAreKept) {
  UnprovenConnections connections(2);
  const auto one = link(), other = link();
  accept_into(connections, one.server);
  accept_into(connections, other.server);
  EXPECT_FALSE(connections.make_room());  // neither has exceeded its time
  connections.prove(one.peer);
  EXPECT_TRUE(connections.make_room());
  connections.prove(other.peer);
  EXPECT_TRUE(connections.make_room());
  EXPECT_TRUE(connections.empty());
  EXPECT_FALSE(one.is_ended() || other.is_ended());
}

TEST_P(Unproven, OneThatHasEndedMakesRoom) {
  UnprovenConnections connections(1);
  const auto one = link();
  accept_into(connections, one.server);
  EXPECT_FALSE(connections.make_room());
  shutdown(one.server.get(), SHUT_RDWR);  // as gRPC does
  EXPECT_TRUE(connections.make_room());
  EXPECT_TRUE(connections.empty());
}

TEST(UnprovenConnections, AFullOneEndsTheOldestThatIsSilentBeforeOneThatIsSlow) {
  const auto listener = transport::listen_at("127.0.0.1:0", {});
  const auto link = [&] { return Link::make(listener, "127.0.0.1"); };
  UnprovenConnections connections(2);
  const auto slow = link(), silent = link();
  ::send(slow.stranger.get(), "hello", 5, 0);
  accept_into(connections, slow.server);
  accept_into(connections, silent.server);
  const auto wait_for_room = [&] {
    const auto deadline = Deadline::after(std::chrono::seconds(20));
    while (!connections.make_room() && !deadline.passed()) usleep(1000);
  };
  wait_for_room();
  EXPECT_TRUE(silent.is_ended());
  EXPECT_FALSE(slow.is_ended());
  const auto next = link();
  ::send(next.stranger.get(), "hello", 5, 0);
  accept_into(connections, next.server);
  wait_for_room();
  EXPECT_TRUE(slow.is_ended());
  EXPECT_FALSE(next.is_ended());
}

// A process of the job may be slow, and only needs its place where another connection waits for that.
TEST(UnprovenConnections, AFullOneEndsNoneWhereNoneWaits) {
  const auto listener = transport::listen_at("127.0.0.1:0", {});
  UnprovenConnections connections(1);
  const auto silent = Link::make(listener, "127.0.0.1");
  accept_into(connections, silent.server);
  const auto longer_than_it_may_be_silent = Deadline::after(std::chrono::milliseconds(150));
  while (!longer_than_it_may_be_silent.passed()) {
    connections.forget();
    usleep(1000);
  }
  EXPECT_FALSE(silent.is_ended());
  EXPECT_FALSE(connections.empty());
  EXPECT_TRUE(connections.make_room());
  EXPECT_TRUE(silent.is_ended());
}

// Another connection waits then, and is not lost.
TEST(UnprovenConnections, ThereIsNoRoomWithoutADescriptor) {
  const auto listener = transport::listen_at("127.0.0.1:0", {});
  UnprovenConnections connections(2);
  const auto one = Link::make(listener, "127.0.0.1"), other = Link::make(listener, "127.0.0.1");
  accept_into(connections, one.server);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const FileDescriptor next(dup(0));
  const rlimit none{static_cast<rlim_t>(next.get()), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_FALSE(connections.make_room());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  accept_into(connections, other.server);
  EXPECT_FALSE(one.is_ended() || other.is_ended());
}

INSTANTIATE_TEST_SUITE_P(Addresses, Unproven,
                         testing::Values(std::pair("127.0.0.1", "127.0.0.1"), std::pair("[::1]", "[::1]"),
                                         std::pair("[::]", "127.0.0.1")));

}  // namespace
}  // namespace lockstep::grpc_service
