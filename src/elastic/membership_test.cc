#include "elastic/membership.h"

#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <thread>

namespace lockstep::elastic {
namespace {

constexpr double kSeconds = 30;

Deadline soon() { return Deadline::after(std::chrono::duration<double>(kSeconds)); }

// A process comes to a job of one process. The training sees it without being asked.
TEST(Membership, OneThatComesIsSeenAndBecomesAMember) {
  const auto store = Store::hold("127.0.0.1:0");
  Cluster cluster{.store = store.address(), .host_store = store.address(), .source = "a test"};
  JobMembership member(Job(cluster, kSeconds), 1, 0);
  const auto training = member.open(0, "model 1");
  std::optional<World> place;
  std::jthread comes([&, later = cluster]() mutable {
    later.joins = true;
    JobMembership newcomer(Job::newcomer(later, kSeconds), 1, 0);
    EXPECT_TRUE(newcomer.is_newcomer());
    if (!newcomer.wait_for_place(0, "model 1", soon(), [] {})) return;
    newcomer.take_place();
    EXPECT_FALSE(newcomer.is_newcomer());
    place = newcomer.world();
  });
  Change change;
  for (const auto deadline = soon(); change.newcomers.empty() && !deadline.passed(); std::this_thread::yield())
    change.newcomers = training->newcomers();
  ASSERT_EQ(change.newcomers.size(), 1U);
  EXPECT_TRUE(training->newcomers_wait());
  member.regroup(change, soon());
  training->on_change();
  EXPECT_FALSE(training->newcomers_wait());
  EXPECT_EQ(member.world().size, 2);
  comes.join();
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->rank, 1);
  EXPECT_EQ(place->size, 2);
}

}  // namespace
}  // namespace lockstep::elastic
