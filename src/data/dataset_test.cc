// Every stage against a plain list, and positions: an iterator that starts anywhere goes on as one that came there.
#include "lockstep/data/dataset.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"

namespace lockstep::data {
namespace {

using Numbers = std::vector<std::int64_t>;

Dataset range(std::int64_t count) {
  const auto x = at::arange(count);
  return Dataset::from_tensor_slices(x, x * 10);
}

// All x of an epoch from a position on; batches are flattened.
Numbers read(const Dataset& data, Position from = {}, std::size_t most = 1000) {
  Numbers numbers;
  auto iterator = data.iterate(from);
  while (numbers.size() < most) {
    const auto element = iterator.next();
    if (!element) break;
    const auto x = element->x.flatten().contiguous();
    EXPECT_TRUE(at::equal(element->y.flatten(), x * 10));
    numbers.insert(numbers.end(), x.const_data_ptr<std::int64_t>(), x.const_data_ptr<std::int64_t>() + x.numel());
  }
  return numbers;
}

Numbers iota(std::int64_t count) {
  Numbers numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

Example negate(Example example) { return {-example.x, -example.y}; }

Dataset generated(std::int64_t count) {
  return Dataset::from_generator([count]() -> Dataset::Generator {
    return [count, next = std::int64_t{0}]() mutable -> std::optional<Example> {
      if (next == count) return std::nullopt;
      const auto x = at::scalar_tensor(next++, at::kLong);
      return Example{x, x * 10};
    };
  });
}

TEST(Dataset, SelectsAsAListWould) {
  EXPECT_EQ(read(range(5)), (Numbers{0, 1, 2, 3, 4}));
  EXPECT_EQ(read(range(5).take(3)), (Numbers{0, 1, 2}));
  EXPECT_EQ(read(range(5).skip(3)), (Numbers{3, 4}));
  EXPECT_EQ(read(range(7).shard(3, 1)), (Numbers{1, 4}));
  EXPECT_EQ(read(range(3).repeat(2)), (Numbers{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(read(range(3).repeat(), {}, 7), (Numbers{0, 1, 2, 0, 1, 2, 0}));
  EXPECT_EQ(read(range(0).repeat()), Numbers{});
  EXPECT_EQ(read(range(3).map(negate)), (Numbers{0, -1, -2}));
  EXPECT_EQ(read(generated(4).skip(1).take(2)), (Numbers{1, 2}));
}

TEST(Dataset, BatchesKeepTheRaggedEnd) {
  const auto sizes = [](const Dataset& data) {
    Numbers found;
    auto iterator = data.iterate();
    while (const auto batch = iterator.next()) found.push_back(batch->size());
    return found;
  };
  EXPECT_EQ(sizes(range(7).batch(3)), (Numbers{3, 3, 1}));
  EXPECT_EQ(sizes(range(7).batch(3, {.drop_remainder = true})), (Numbers{3, 3}));
  EXPECT_EQ(sizes(range(7).map(negate).batch(4)), (Numbers{4, 3}));
}

TEST(Dataset, CardinalitiesAreTheNumbersOfElements) {
  const auto d = range(10);
  EXPECT_EQ(d.batch(3).cardinality(), 4);
  EXPECT_EQ(d.batch(3, {.drop_remainder = true}).cardinality(), 3);
  EXPECT_EQ(d.take(4).cardinality(), 4);
  EXPECT_EQ(d.take(40).cardinality(), 10);
  EXPECT_EQ(d.skip(4).cardinality(), 6);
  EXPECT_EQ(d.skip(40).cardinality(), 0);
  EXPECT_EQ(d.shard(3, 0).cardinality(), 4);
  EXPECT_EQ(d.shard(3, 2).cardinality(), 3);
  EXPECT_EQ(d.repeat(3).cardinality(), 30);
  EXPECT_EQ(d.repeat().cardinality(), Dataset::kInfinite);
  EXPECT_EQ(d.repeat().take(7).cardinality(), 7);
  EXPECT_EQ(d.map(negate).cache().shuffle(3).prefetch(2).cardinality(), 10);
  EXPECT_EQ(generated(3).batch(2).cardinality(), Dataset::kUnknown);
}

TEST(Dataset, ShuffleIsAPermutationAnewEachEpoch) {
  for (const std::int64_t buffer : {1, 5, 50, 500}) {
    const auto data = range(100).shuffle(buffer, {.seed = 3});
    auto first = read(data);
    EXPECT_EQ(first, read(data)) << "the same epoch twice";
    EXPECT_EQ(first == read(data, {.epoch = 1}), buffer == 1) << "another epoch";
    if (buffer > 1) {
      EXPECT_NE(first, iota(100));
    }
    for (std::size_t i = 0; i < first.size(); ++i) EXPECT_LT(first[i], static_cast<std::int64_t>(i) + buffer);
    std::sort(first.begin(), first.end());
    EXPECT_EQ(first, iota(100));
  }
  EXPECT_NE(read(range(100).shuffle(100, {.seed = 3})), read(range(100).shuffle(100, {.seed = 4})));
  const auto fixed = range(50).shuffle(50, {.seed = 1, .reshuffle_each_iteration = false});
  EXPECT_EQ(read(fixed), read(fixed, {.epoch = 1}));
}

TEST(Dataset, ShuffleIsUniform) {
  constexpr int kEpochs = 6000;
  std::vector<int> first(6);
  const auto data = range(6).shuffle(6, {.seed = 9});
  for (int epoch = 0; epoch < kEpochs; ++epoch) ++first[static_cast<std::size_t>(read(data, {.epoch = epoch}, 1)[0])];
  for (const int count : first) EXPECT_NEAR(count, kEpochs / 6, 150);  // five standard deviations
}

TEST(Dataset, RepeatedPassesShuffleDifferently) {
  const auto twice = read(range(30).shuffle(30, {.seed = 3}).repeat(2));
  EXPECT_NE(Numbers(twice.begin(), twice.begin() + 30), Numbers(twice.begin() + 30, twice.end()));
}

TEST(Dataset, APositionGoesOnAsIfNothingHadHappened) {
  set_random_seed(1);
  const auto noisy = [](Example example) {
    example.x = example.x + at::randint(1000, {1}, at::kLong) * 1000;
    example.y = example.x * 10;
    return example;
  };
  const std::vector<Dataset> pipelines{
      range(40),
      range(40).shuffle(7),
      range(40).map(negate).shuffle(40).batch(6),
      range(40).map(noisy).shuffle(9).batch(4).prefetch(2),
      range(40).map(noisy, {.num_parallel_calls = 3}).cache().shuffle(11).batch(3).repeat(2),
      range(10).shuffle(10).batch(3).repeat(),
      range(40).shard(3, 2).shuffle(5).skip(2).take(8),
      generated(33).shuffle(8).batch(5),
  };
  for (std::size_t i = 0; i < pipelines.size(); ++i) {
    for (const std::int64_t epoch : {0, 1}) {
      const auto all = read(pipelines[i], {.epoch = epoch}, 60);
      auto iterator = pipelines[i].iterate({.epoch = epoch});
      std::size_t seen = 0;
      for (int step = 0; step < 5; ++step) {
        const auto rest = read(pipelines[i], iterator.position(), 60 - seen);
        EXPECT_EQ(rest, Numbers(all.begin() + static_cast<std::ptrdiff_t>(seen), all.end()))
            << "pipeline " << i << ", step " << step;
        const auto element = iterator.next();
        if (!element) break;
        seen += static_cast<std::size_t>(element->x.numel());
      }
    }
  }
}

TEST(Dataset, ParallelMapKeepsTheOrder) {
  const auto slow_first = [](Example example) {
    volatile double sink = 0;
    for (std::int64_t i = 0; i < 1000 * (40 - example.x.item<std::int64_t>()); ++i) sink = sink + 1;
    return example;
  };
  EXPECT_EQ(read(range(40).map(slow_first, {.num_parallel_calls = 4})), iota(40));
}

TEST(Dataset, WhatAFunctionThrowsComesOutInItsPlace) {
  for (const int calls : {1, 3}) {
    for (const bool prefetched : {false, true}) {
      auto data = range(10).map(
          [](Example example) {
            if (example.x.item<std::int64_t>() == 4) throw std::runtime_error("four");
            return example;
          },
          {.num_parallel_calls = calls});
      if (prefetched) data = data.prefetch(3);
      auto iterator = data.iterate();
      for (int i = 0; i < 4; ++i) EXPECT_EQ(iterator.next()->x.item<std::int64_t>(), i);
      EXPECT_THROW(iterator.next(), std::runtime_error);
    }
  }
}

TEST(Dataset, CacheCallsAFunctionOnceAnElement) {
  std::atomic<int> calls = 0;
  const auto data = range(20)
                        .map([&](Example example) {
                          ++calls;
                          return example;
                        })
                        .cache();
  EXPECT_EQ(read(data, {}, 5).size(), 5U);  // an epoch that is left early is not kept
  calls = 0;
  EXPECT_EQ(read(data), iota(20));
  EXPECT_EQ(read(data), iota(20));
  EXPECT_EQ(calls, 20);
}

TEST(Dataset, AFileCacheOutlivesTheDataset) {
  const auto folder = std::filesystem::path(LOCKSTEP_BINARY_DIR) / "data_cache";
  std::filesystem::remove_all(folder);
  const auto file = (folder / "cached").string();
  EXPECT_EQ(read(range(20).cache(file)), iota(20));
  const auto failing = [](Example) -> Example { throw std::runtime_error("called"); };
  EXPECT_EQ(read(range(20).map(failing).cache(file)), iota(20));
}

TEST(Dataset, AnIteratorThatIsDroppedEndsItsThreads) {
  auto iterator = range(1000).map(negate, {.num_parallel_calls = 4}).prefetch(4).iterate();
  iterator.next();
}  // hangs if not

TEST(Dataset, BadArgumentsAreNamed) {
  EXPECT_THROW(range(3).batch(0), InvalidArgument);
  EXPECT_THROW(range(3).shuffle(0), InvalidArgument);
  EXPECT_THROW(range(3).take(-1), InvalidArgument);
  EXPECT_THROW(range(3).skip(-1), InvalidArgument);
  EXPECT_THROW(range(3).shard(2, 2), InvalidArgument);
  EXPECT_THROW(range(3).repeat(-3), InvalidArgument);
  EXPECT_THROW(range(3).prefetch(0), InvalidArgument);
  EXPECT_THROW(range(3).map(negate, {.num_parallel_calls = 0}), InvalidArgument);
  EXPECT_THROW(Dataset::from_tensor_slices(at::ones({3}), at::ones({4})), InvalidArgument);
  EXPECT_THROW(Dataset::from_tensor_slices(at::scalar_tensor(3)), InvalidArgument);
  const auto ragged = range(3).map([](Example example) {
    example.x = at::ones({example.x.item<std::int64_t>()});
    return example;
  });
  EXPECT_THROW(ragged.batch(3).iterate().next(), InvalidArgument);
}

TEST(Dataset, AMapThatWorksInPlaceChangesNothingElse) {
  const auto table = at::zeros({6, 3});
  const auto add_one = [](Example e) {
    e.x.add_(1);
    return e;
  };
  for (const int calls : {1, 2}) {
    const auto cached = Dataset::from_tensor_slices(table).map(add_one, {.num_parallel_calls = calls}).cache();
    const auto data = cached.map(add_one, {.num_parallel_calls = calls}).batch(6);
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      EXPECT_TRUE(at::equal(data.iterate({.epoch = epoch}).next()->x, at::full({6, 3}, 2)));
    }
  }
  EXPECT_TRUE(at::equal(table, at::zeros({6, 3})));
}

TEST(Dataset, KnowsWhatLiesInMemory) {
  const auto rows = Dataset::from_tensor_slices(at::zeros({6, 3}));
  EXPECT_TRUE(rows.shuffle(3).repeat(2).skip(1).take(4).shard(2, 0).batch(2).lies_in_memory());
  const auto same = [](Example e) { return e; };
  EXPECT_FALSE(rows.map(same).batch(2).lies_in_memory());
  EXPECT_FALSE(rows.prefetch(2).lies_in_memory());
  const auto cached = rows.map(same).cache();
  const auto batches = cached.batch(4);
  EXPECT_FALSE(batches.lies_in_memory());
  for (auto iterator = batches.iterate(); iterator.next();) continue;
  EXPECT_TRUE(batches.lies_in_memory());
}

// The first element was read, and comes again; what is skipped after it is skipped.
TEST(Dataset, KeepingFirstReadsNothingTwiceAndMovesNothing) {
  std::int64_t made = 0;
  const auto counted = Dataset::from_tensor_slices(at::arange(10)).map([&](Example e) {
    ++made;
    return e;
  });
  const auto rest_of = [](const Dataset& data, Position position) {
    std::vector<std::int64_t> values;
    auto iterator = data.iterate(position);
    while (const auto batch = iterator.next()) values.push_back(batch->x[0].item<std::int64_t>());
    return values;
  };
  const auto plain = counted.batch(2);
  for (const auto& data : {plain, plain.prefetch(2), plain.shuffle(3, {.seed = 1})}) {
    for (const std::int64_t index : {0, 1, 3, 5, 9}) {
      const auto expected = rest_of(data, {.epoch = 1, .index = index});
      const auto kept = data.keeping_first();
      const auto first = kept.first(1);
      ASSERT_TRUE(first && kept.first(1));
      EXPECT_EQ(rest_of(kept, {.epoch = 1, .index = index}), expected) << index;
      EXPECT_EQ(rest_of(kept, {.epoch = 1, .index = index}), expected) << "again, " << index;
    }
  }
  const auto kept = plain.keeping_first();
  made = 0;
  kept.first();
  rest_of(kept, {});
  EXPECT_EQ(made, 10);
  EXPECT_FALSE(plain.take(0).keeping_first().first());
}

TEST(Dataset, KeepingFirstForgetsItInAnotherEpoch) {
  const auto held = std::make_shared<int>(0);
  const auto data = Dataset::from_generator([held]() -> Dataset::Generator {
    return [copy = held, n = 0]() mutable { return n++ < 3 ? std::optional(Example{at::ones({1})}) : std::nullopt; };
  });
  const auto kept = data.keeping_first();
  const auto before = held.use_count();
  ASSERT_TRUE(kept.first(0));
  EXPECT_GT(held.use_count(), before);
  while (kept.iterate({.epoch = 1}).next()) break;
  EXPECT_EQ(held.use_count(), before);
}

TEST(Dataset, AHugeBatchTakesNoMoreThanThereIs) {
  EXPECT_EQ(Dataset::from_tensor_slices(at::zeros({6, 3})).batch(std::int64_t{1} << 60).iterate().next()->size(), 6);
}

}  // namespace
}  // namespace lockstep::data
