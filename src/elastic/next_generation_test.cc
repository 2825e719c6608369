#include "elastic/next_generation.h"

#include <gtest/gtest.h>

#include <map>
#include <thread>
#include <tuple>
#include <vector>

#include "base/expect_says_testing.h"
#include "base/mutex.h"
#include "elastic/membership.h"
#include "lockstep/base/error.h"
#include "lockstep/elastic/job.h"

namespace lockstep::elastic {
namespace {

Deadline within_seconds(double seconds) { return Deadline::after(std::chrono::duration<double>(seconds)); }

// Four ranks on two hosts: 0 and 1 on "a", 2 and 3 on "b".
World world_of(int rank) {
  return {.rank = rank, .size = 4, .local_rank = rank % 2, .local_size = 2, .host = rank < 2 ? "a" : "b"};
}

// Returns the four members, with one store for all.
Members members_of(int rank, const Store& store) {
  return first_members(world_of(rank), {"a", "a", "b", "b"}, std::vector<std::string>(4, store.address()));
}
Registry registry_of(int rank, const Store& store) {
  return Registry(std::make_shared<cluster::ConnectedStores>(store), members_of(rank, store));
}

World regroup(int rank, const Store& store, const Change& change, double seconds = 5) {
  auto registry = registry_of(rank, store);
  return next_generation(members_of(rank, store), registry, change, within_seconds(seconds)).world;
}

// Returns the world that each of `ranks` finds, unless it is left out. `lost`: the losses that each rank knows of.
std::map<int, World> found_by(const Store& store, const std::vector<int>& ranks, std::map<int, std::vector<int>> lost,
                              double seconds) {
  Mutex mutex;
  std::map<int, World> found;  // guarded by mutex
  std::vector<std::jthread> threads;
  for (const int rank : ranks) {
    threads.emplace_back([&, rank, known = lost[rank]] {
      try {
        const auto next = regroup(rank, store, {.lost = known}, seconds);
        MutexLock lock(mutex);
        found[rank] = next;
      } catch (const ClusterError&) {
      }
    });
  }
  threads.clear();
  return found;
}

TEST(NextGeneration, RanksKeepTheirOrderAndOneThatKnowsOfALossIsEnough) {
  const auto begin = within_seconds(0);
  const auto found = found_by(Store::hold("127.0.0.1:0"), {0, 2, 3}, {{2, {1}}}, 30);
  EXPECT_LT(begin.waited().count(), 20);  // nobody waited for rank 1 until the deadline
  ASSERT_EQ(found.size(), 3U);
  for (const auto& [rank, world] : found) {
    EXPECT_EQ(world.generation, 1);
    EXPECT_EQ(world.size, 3);
    EXPECT_EQ(world.rank, rank == 0 ? 0 : rank - 1);
    EXPECT_EQ(world.local_size, rank == 0 ? 1 : 2);
    EXPECT_EQ(world.local_rank, rank == 3 ? 1 : 0);
  }
}

TEST(NextGeneration, WhoDoesNotComeByTheDeadlineIsLeftOutAndTold) {
  const auto store = Store::hold("127.0.0.1:0");
  const auto found = found_by(store, {0, 1, 3}, {}, 0.2);
  ASSERT_EQ(found.size(), 3U);
  for (const auto& [rank, world] : found) EXPECT_EQ(world.size, 3);
  expect_says(message_of<ClusterError>([&] { regroup(2, store, {}); }), "the others took rank 2 for lost");
}

TEST(NextGeneration, NobodyWaitsForAProcessThatHasGone) {
  const auto begin = within_seconds(0);
  const auto store = Store::hold("127.0.0.1:0");
  cluster::show_presence(store, name_of_process(1));  // for no longer than this line
  const auto found = found_by(store, {0, 2, 3}, {}, 30);
  EXPECT_LT(begin.waited().count(), 20);
  ASSERT_EQ(found.size(), 3U);
  for (const auto& [rank, world] : found) EXPECT_EQ(world.size, 3);
}

// A link broke, and each of its ends takes the other for lost: one at least goes on, whoever comes first.
TEST(NextGeneration, TwoThatBlameEachOtherAreNotBothLeftOut) {
  for (int i = 0; i < 100; ++i) {
    const auto found = found_by(Store::hold("127.0.0.1:0"), {0, 1}, {{0, {1, 2, 3}}, {1, {0, 2, 3}}}, 30);
    ASSERT_GE(found.size(), 1U) << i;
    for (const auto& [rank, world] : found) EXPECT_EQ(world.size, static_cast<int>(found.size()));
  }
}

TEST(NextGeneration, RanksThatThereAreNotAreNamed) {
  const auto store = Store::hold("127.0.0.1:0");
  for (const int rank : {-1, 4}) {
    expect_says(message_of<InvalidArgument>([&] { regroup(1, store, {.lost = {rank}}); }),
                "is said to be lost; ranks are 0 to 3");
  }
}

// The ranks that a DeadlineExceeded lists may include the rank itself.
TEST(NextGeneration, ARankThatComesIsNotLostByItsOwnWord) {
  EXPECT_EQ(regroup(1, Store::hold("127.0.0.1:0"), {.lost = {0, 1, 2, 3}}).size, 1);
}

TEST(Members, AreNamedByTheLaunchersRanksWhereTheseDiffer) {
  Members members;
  members.world = {.rank = 0, .size = 4, .generation = 3};
  for (const auto& name :
       {name_of_process(0), name_of_process(2), name_of_newcomer("5", "1") + "1f", name_of_newcomer("", "") + "2e"})
    members.processes.push_back({.name = name, .host = "a"});
  EXPECT_EQ(launchers_ranks(members, {0, 3, 4}), "");
  EXPECT_EQ(launchers_ranks(members, {0, 1, 2}), " (rank 1 is the launcher's rank 2, rank 2 is the launcher's rank 5)");
  EXPECT_EQ(describe(PeerLost(1, 3, "its process is gone"), members),
            "lost rank 1 of generation 3: its process is gone (rank 1 is the launcher's rank 2)");
  EXPECT_EQ(describe(PeerLost(1, 2, "its process is gone"), members),
            "lost rank 1 of generation 2: its process is gone");
  EXPECT_EQ(describe(Error("a disk is full"), members), "a disk is full");
}

TEST(NextGeneration, NewcomersComeBehindTheOthersAndAreToldTheirPlaces) {
  const auto store = Store::hold("127.0.0.1:0");
  std::vector<std::jthread> threads;
  for (const int rank : {0, 1, 2}) {  // rank 3 leaves, and rank 2 does not know of the newcomers
    threads.emplace_back([&, rank] {
      Change change;
      if (rank != 2) change.newcomers = {{"x", "b", store.address()}, {"y", "c", store.address()}};
      const auto world = regroup(rank, store, change);
      EXPECT_EQ(world.size, 5);
      EXPECT_EQ(world.rank, rank);
      EXPECT_EQ(world.local_size, 2);
    });
  }
  regroup(3, store, {.leaves = true});
  threads.clear();
  auto registry = registry_of(0, store);
  const auto told = [&](const std::string& newcomer) {
    return place_in(registry.read_here(key_of_invitation(newcomer)), {}).world;
  };
  const auto first = told("x"), second = told("y");
  EXPECT_EQ(std::tuple(first.generation, first.rank, first.local_rank, first.local_size), std::tuple(1, 3, 1, 2));
  EXPECT_EQ(std::tuple(second.generation, second.rank, second.local_rank, second.local_size), std::tuple(1, 4, 0, 1));
  refuse(registry, {"z", "c", store.address()}, "another model");
  expect_says(message_of<ClusterError>([&] { told("z"); }), "another model");
}

TEST(Job, OneThatIsAloneMayRegroupToo) {
  auto job = Job(Cluster());
  for (int generation = 1; generation <= 2; ++generation) {
    job = job.regroup(std::vector<int>(), within_seconds(20));
    EXPECT_EQ(job.size(), 1);
    EXPECT_EQ(job.world().generation, generation);
    job.store().set("key", "value", within_seconds(20));
  }
}

}  // namespace
}  // namespace lockstep::elastic
