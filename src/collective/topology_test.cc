#include "collective/topology.h"

#include <gtest/gtest.h>

#include "lockstep/collective/make_group.h"

namespace lockstep {
namespace {

TEST(Topology, AProcessThatCameLaterIsNoChiefUntilItHasJoined) {
  Topology topology;
  topology.train_with(make_thread_groups(1)[0]);
  EXPECT_TRUE(topology.is_chief());
  topology.came_later = true;
  const auto copy = topology;
  EXPECT_TRUE(copy.is_newcomer());
  EXPECT_FALSE(copy.is_chief());
  topology.all.regroup(make_thread_groups(1)[0]);
  EXPECT_FALSE(copy.is_newcomer());
  EXPECT_TRUE(copy.is_chief());
  topology.may_be_chief = false;
  EXPECT_FALSE(topology.is_chief());
}

TEST(Topology, ProcessesWithModelsOfTheirOwnShareStepsAndPerhapsData) {
  const auto ranks = make_thread_groups(2);
  for (const bool with_own_data : {false, true}) {
    Topology topology;
    topology.take_steps_with(ranks[1], with_own_data);
    EXPECT_EQ(topology.all.size(), 1);
    EXPECT_TRUE(topology.has_peers_with_own_models());
    EXPECT_EQ(topology.has_own_data(), with_own_data);
    EXPECT_EQ(topology.data.rank(), 1);
  }
  Topology alone;
  alone.take_steps_with(make_thread_groups(1)[0], true);
  EXPECT_FALSE(alone.has_own_data() || alone.has_peers_with_own_models());
}

}  // namespace
}  // namespace lockstep
