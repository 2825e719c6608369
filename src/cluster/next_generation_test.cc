#include "cluster/next_generation.h"

#include <gtest/gtest.h>

#include <map>
#include <thread>
#include <vector>

#include "base/expect_says_testing.h"
#include "base/mutex.h"
#include "lockstep/base/error.h"

namespace lockstep::cluster {
namespace {

Deadline in(double seconds) { return Deadline::after(std::chrono::duration<double>(seconds)); }

// Four ranks on two hosts: 0 and 1 on "a", 2 and 3 on "b".
World world_of(int rank) {
  return {.rank = rank, .size = 4, .local_rank = rank % 2, .local_size = 2, .host = rank < 2 ? "a" : "b"};
}

// What each of `ranks` finds that is not left out; each knows of the losses that `lost` has for it.
std::map<int, World> found_by(const Store& store, const std::vector<int>& ranks, std::map<int, std::vector<int>> lost,
                              double seconds) {
  Mutex mutex;
  std::map<int, World> found;  // guarded by mutex
  std::vector<std::jthread> threads;
  for (const int rank : ranks) {
    threads.emplace_back([&, rank, known = lost[rank]] {
      try {
        const auto next = next_generation(world_of(rank), store, known, in(seconds));
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
  const auto begin = in(0);
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
  expect_says(message_of<ClusterError>([&] { next_generation(world_of(2), store, {}, in(5)); }),
              "the others took rank 2 for lost");
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
    expect_says(message_of<InvalidArgument>([&] { next_generation(world_of(1), store, {rank}, in(5)); }),
                "is said to be lost; ranks are 0 to 3");
  }
}

// Of those that a DeadlineExceeded lists this rank may be one.
TEST(NextGeneration, ARankThatComesIsNotLostByItsOwnWord) {
  EXPECT_EQ(next_generation(world_of(1), Store::hold("127.0.0.1:0"), {0, 1, 2, 3}, in(5)).size, 1);
}

}  // namespace
}  // namespace lockstep::cluster
