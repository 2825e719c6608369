#include "gradient/ownership.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>

namespace lockstep::gradient {
namespace {

using Lists = ShardsOfRanks;

// [rank]: which elements, as (slot, element), it has.
using Elements = std::vector<std::map<std::pair<std::size_t, std::int64_t>, int>>;

Elements elements_of(const Lists& lists) {
  Elements elements(lists.size());
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    for (const auto& shard : lists[rank]) {
      for (std::int64_t i = 0; i < shard.count; ++i) ++elements[rank][{shard.slot, shard.begin + i}];
    }
  }
  return elements;
}

Lists random_lists(std::mt19937& random, int ranks) {
  Lists lists(static_cast<std::size_t>(ranks));
  for (auto& list : lists) {
    for (std::size_t slot = 0; slot < 4; ++slot) {
      if (random() % 3 == 0) continue;
      const auto begin = static_cast<std::int64_t>(random() % 40);
      list.push_back({slot, begin, static_cast<std::int64_t>(1 + random() % 40)});
    }
  }
  return lists;
}

TEST(ShardMoves, EachElementComesOnceFromOneThatHasIt) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const int ranks = 1 + static_cast<int>(random() % 5);
    const auto had = random_lists(random, ranks), needed = random_lists(random, ranks);
    const auto has = elements_of(had), needs = elements_of(needed);
    const auto [moves, lost] = moves_between(had, needed);
    Elements got(has.size());
    for (const auto& move : moves) {
      for (std::int64_t i = 0; i < move.part.count; ++i) {
        const std::pair element(move.part.slot, move.part.begin + i);
        EXPECT_TRUE(has[static_cast<std::size_t>(move.from)].contains(element)) << seed;
        ++got[static_cast<std::size_t>(move.to)][element];
        const bool has_it = has[static_cast<std::size_t>(move.to)].contains(element);
        EXPECT_EQ(has_it, move.from == move.to) << seed;
      }
    }
    std::size_t missing = 0;
    for (std::size_t rank = 0; rank < needs.size(); ++rank) {
      for (const auto& [element, count] : needs[rank]) {
        bool any = false;
        for (const auto& one : has) any = any || one.contains(element);
        EXPECT_EQ(got[rank][element], any ? count : 0) << seed;
        missing += any ? 0 : 1;
      }
    }
    std::size_t said = 0;
    for (const auto& part : lost) said += static_cast<std::size_t>(part.count);
    EXPECT_EQ(said, missing) << seed;
  }
}

TEST(ShardMoves, SeveralThatHaveALargeShardSendAPartEach) {
  constexpr std::int64_t kCount = 1 << 20;
  const Lists had{{{0, 0, kCount}}, {{0, 0, kCount}}, {}, {{0, 0, kCount}}}, needed{{}, {}, {{0, 0, kCount}}, {}};
  std::map<int, std::int64_t> sent;
  for (const auto& move : moves_between(had, needed).moves) sent[move.from] += move.part.count;
  ASSERT_EQ(sent.size(), 3U);
  for (const auto& [from, count] : sent) EXPECT_NEAR(static_cast<double>(count), kCount / 3.0, 1) << from;
}

TEST(FlatLayout, CutsEachElementOfASlotOnce) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::mt19937 random(seed);
    const int ranks = 1 + static_cast<int>(random() % 5);
    const bool padded = random() % 2 == 0;
    FlatLayout layout(at::kFloat, /*aligned=*/random() % 2 == 0);
    std::vector<std::int64_t> numels;
    for (std::size_t slot = 0; slot < 5; ++slot) {
      numels.push_back(static_cast<std::int64_t>(random() % 100));
      layout.add(slot, numels.back());
    }
    if (padded) layout.pad_for(ranks);
    const auto cut = layout.cut(ranks, DType::float32);
    std::map<std::pair<std::size_t, std::int64_t>, int> seen;
    std::int64_t range_begin = 0;
    for (std::size_t rank = 0; rank < cut.shards.size(); ++rank) {
      const auto range_end = range_begin + static_cast<std::int64_t>(cut.counts[rank]);
      EXPECT_TRUE(!padded || range_end - range_begin == layout.numel() / ranks) << seed;
      for (const auto& shard : cut.shards[rank]) {
        const auto place = layout.places()[shard.slot].begin + shard.begin;
        EXPECT_TRUE(range_begin <= place && place + shard.count <= range_end) << seed;
        EXPECT_EQ(shard_of(cut.shards[rank], shard.slot).begin, shard.begin) << seed;
        for (std::int64_t i = 0; i < shard.count; ++i) ++seen[{shard.slot, shard.begin + i}];
      }
      range_begin = range_end;
    }
    EXPECT_EQ(range_begin, layout.numel()) << seed;
    std::size_t elements = 0;
    for (const auto numel : numels) elements += static_cast<std::size_t>(numel);
    EXPECT_EQ(seen.size(), elements) << seed;
    for (const auto& [element, times] : seen) EXPECT_EQ(times, 1) << seed;
  }
}

TEST(FlatLayout, SlotsBeginAtCacheLinesUnlessTheyArePacked) {
  FlatLayout aligned(at::kDouble), packed(at::kDouble, /*aligned=*/false);
  for (auto* const layout : {&aligned, &packed}) layout->add(0, 3);
  EXPECT_EQ(aligned.add(1, 1), 8);
  EXPECT_EQ(packed.add(1, 1), 3);
  EXPECT_EQ(shard_of({{1, 5, 2}, {4, 0, 9}}, 4).count, 9);
  EXPECT_EQ(shard_of({{1, 5, 2}, {4, 0, 9}}, 3).count, 0);
}

TEST(ShardMoves, CopiesAreOnOtherHosts) {
  EXPECT_EQ(distance_of_copies({"a"}), 0);
  EXPECT_EQ(distance_of_copies({"a", "a", "a"}), 1);
  EXPECT_EQ(distance_of_copies({"a", "b", "c"}), 1);
  EXPECT_EQ(distance_of_copies({"a", "a", "b", "b"}), 2);
  EXPECT_EQ(distance_of_copies({"a", "a", "a", "b", "b", "b", "c", "c", "c"}), 3);
  EXPECT_EQ(distance_of_copies({"a", "b", "a", "b"}), 1);
}

}  // namespace
}  // namespace lockstep::gradient
