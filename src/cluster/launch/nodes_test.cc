#include "cluster/launch/nodes.h"

#include <gtest/gtest.h>

#include <future>
#include <sstream>
#include <thread>

#include "base/text.h"
#include "cluster/launch/hosts.h"
#include "cluster/rendezvous.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

struct Arrival {
  std::unique_ptr<Node> node;
  std::ostringstream said;
  std::atomic<bool> stops = false;
  std::future<std::optional<NodePlace>> place;
};

// A launcher that comes to the store.
std::unique_ptr<Arrival> arrive(const Store& store, int processes, const NodeLimits& limits) {
  auto one = std::make_unique<Arrival>();
  one->node = std::make_unique<Node>(Store::connect(store.address(), soon()), processes);
  one->place = std::async(std::launch::async, [&one = *one, limits] {
    return one.node->wait(
        limits, [&] { return one.stops.load(); }, one.said);
  });
  return one;
}

void wait_until_registered(const Store& store, const std::string& host) {
  const auto deadline = soon();
  while (store.compare_set("nodes", "", "", soon()).find(host + " ") == std::string::npos) {
    ASSERT_FALSE(deadline.passed());
    std::this_thread::yield();
  }
}

TEST(Nodes, TheJobBeginsWhenAsManyHaveComeAsThereMayBe) {
  const auto store = Store::hold("127.0.0.1:0");
  const NodeLimits limits{.fewest = 1, .most = 3, .last_call_seconds = 600};
  std::vector<std::unique_ptr<Arrival>> nodes;
  for (const int processes : {2, 1, 4}) {
    nodes.push_back(arrive(store, processes, limits));
    wait_until_registered(store, nodes.back()->node->host());
  }
  const int first[] = {0, 2, 3};
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const auto place = nodes[i]->place.get().value();
    EXPECT_EQ(place.first, first[i]);
    EXPECT_EQ(place.size, 7);
    EXPECT_FALSE(place.joins);
    for (std::size_t other = 0; other < i; ++other) EXPECT_NE(place.host, nodes[other]->node->host());
  }
}

TEST(Nodes, TheFewestBeginAfterTheLastCall) {
  const auto store = Store::hold("127.0.0.1:0");
  const NodeLimits limits{.fewest = 2, .most = 3, .last_call_seconds = 0.2};
  auto one = arrive(store, 1, limits);
  wait_until_registered(store, one->node->host());
  auto other = arrive(store, 1, limits);
  EXPECT_EQ(one->place.get()->size, 2);
  EXPECT_EQ(other->place.get()->size, 2);
  EXPECT_NE(one->said.str().find("2 nodes have come: waiting for more, up to 3"), std::string::npos) << one->said.str();
}

TEST(Nodes, OneThatEndsBeforeTheJobBeginsIsNotCounted) {
  const auto store = Store::hold("127.0.0.1:0");
  const NodeLimits limits{.fewest = 2, .most = 2, .last_call_seconds = 600};
  auto one = arrive(store, 1, limits);
  wait_until_registered(store, one->node->host());
  one->stops = true;
  EXPECT_FALSE(one->place.get());
  one.reset();
  auto second = arrive(store, 1, limits), third = arrive(store, 1, limits);
  EXPECT_EQ(second->place.get()->size, 2);
  EXPECT_EQ(third->place.get()->size, 2);
}

TEST(Nodes, OneThatComesLaterJoinsWhereThereIsRoom) {
  const auto store = Store::hold("127.0.0.1:0");
  auto first = arrive(store, 2, {.fewest = 1, .most = 1});
  EXPECT_FALSE(first->place.get()->joins);
  const auto members = [&](const std::string& hosts) { store.set(cluster::kMembersNow, "0\n" + hosts, soon()); };
  members("process-0 a:1 0 one\nprocess-1 b:1 0 two\n");
  auto late = arrive(store, 1, {.fewest = 1, .most = 2});
  EXPECT_EQ(late->place.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  members("process-0 a:1 0 one\nprocess-1 a:1 0 one\n");
  const auto place = late->place.get().value();
  EXPECT_TRUE(place.joins);
  EXPECT_EQ(place.first, 2);
  EXPECT_NE(late->said.str().find("the job runs on 2 nodes, which may be 2"), std::string::npos) << late->said.str();
}

TEST(Nodes, OfSeveralThatComeTogetherNoneIsTooMany) {
  const auto store = Store::hold("127.0.0.1:0");
  auto first = arrive(store, 1, {.fewest = 1, .most = 1});
  EXPECT_FALSE(first->place.get()->joins);
  store.set(cluster::kMembersNow, "0\nprocess-0 a:1 0 one\n", soon());
  std::vector<std::unique_ptr<Arrival>> late;
  for (int i = 0; i < 4; ++i) late.push_back(arrive(store, 1, {.fewest = 1, .most = 3}));
  const auto joined = [&] {
    int count = 0;
    for (const auto& one : late)
      count += one->place.wait_for(std::chrono::milliseconds(200)) == std::future_status::ready ? 1 : 0;
    return count;
  };
  const auto deadline = soon();
  while (joined() < 2) ASSERT_FALSE(deadline.passed());
  EXPECT_EQ(joined(), 2);
  for (auto& one : late) one->stops = true;
}

TEST(Nodes, TheirNumberIsChecked) {
  EXPECT_EQ(parse_nodes("4"), std::pair(4, 4));
  EXPECT_EQ(parse_nodes("1:4"), std::pair(1, 4));
  for (const char* const bad : {"", "0", "3:2", "1:", ":4", "two", "1:4:5", "-1"})
    EXPECT_THROW(parse_nodes(bad), InvalidArgument) << bad;
}

}  // namespace
}  // namespace lockstep::launch
