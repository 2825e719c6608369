#include "parameter_server/shard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "base/expect_says_testing.h"

namespace lockstep::parameter_server {
namespace {

using Values = std::vector<double>;

Memory memory_of(const Values& values) {
  const Memory memory(new std::byte[values.size() * sizeof(double)]);
  std::memcpy(memory.get(), values.data(), values.size() * sizeof(double));
  return memory;
}

Shard shard_of(const Values& values, const Optimizer& optimizer) {
  return {memory_of(values), values.size(), DType::float64, optimizer};
}

bool apply(Shard& shard, std::int64_t step, const std::vector<Values>& gradients, double divide_by = 1) {
  std::vector<const std::byte*> bytes;
  for (const auto& gradient : gradients) bytes.push_back(reinterpret_cast<const std::byte*>(gradient.data()));
  return shard.apply(step, bytes, divide_by);
}

Values values_of(const Shard& shard) {
  Values values(shard.count());
  shard.read(reinterpret_cast<std::byte*>(values.data()));
  return values;
}

TEST(AppliedSteps, KnowsEveryStepInAnyOrder) {
  std::vector<std::int64_t> order(200);
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  AppliedSteps steps;
  std::set<std::int64_t> plain;
  for (const auto step : order) {
    EXPECT_TRUE(steps.add(step));
    EXPECT_FALSE(steps.add(step));
    plain.insert(step);
    ASSERT_EQ(steps.count(), static_cast<std::int64_t>(plain.size()));
    const AppliedSteps restored(steps.numbers());
    for (std::int64_t other = 0; other < 200; ++other) {
      ASSERT_EQ(steps.contains(other), plain.contains(other));
      ASSERT_EQ(restored.contains(other), plain.contains(other));
    }
  }
  EXPECT_EQ(steps.numbers(), std::vector<std::int64_t>{200});  // nothing but the bound
}

TEST(Shard, MovesAsAPlainLoopWould) {
  Values expected{1, -2, 3}, momentum(3);
  auto shard = shard_of(expected, SGD({.learning_rate = ExponentialDecay(0.1, {.decay_steps = 1, .decay_rate = 0.5}),
                                       .momentum = 0.9,
                                       .clipvalue = 0.4}));
  for (int step = 0; step < 5; ++step) {
    const Values first{0.1 * step, 1, -1}, second{0.3, 2, -0.5};
    EXPECT_TRUE(apply(shard, step, {first, second}, 4));
    for (std::size_t i = 0; i < 3; ++i) {
      const double gradient = std::clamp((first[i] + second[i]) / 4, -0.4, 0.4);
      momentum[i] = 0.9 * momentum[i] - 0.1 * std::pow(0.5, step) * gradient;
      expected[i] += momentum[i];
      EXPECT_NEAR(values_of(shard)[i], expected[i], 1e-14);
    }
  }
  EXPECT_EQ(shard.steps(), 5);
}

TEST(Shard, AStepIsAppliedOnce) {
  auto shard = shard_of({1}, SGD({.learning_rate = 1}));
  EXPECT_TRUE(apply(shard, 7, {{0.25}}));
  EXPECT_FALSE(apply(shard, 7, {{0.25}}));
  EXPECT_TRUE(apply(shard, 3, {}));  // without gradients
  EXPECT_FALSE(apply(shard, 3, {{0.25}}));
  EXPECT_EQ(values_of(shard), Values{0.75});
  EXPECT_EQ(shard.steps(), 2);
}

TEST(Shard, AStepThatThrowsIsNotApplied) {
  bool fails = true;
  auto shard = shard_of({1}, SGD({.learning_rate = LearningRate([&](std::int64_t) { return fails ? NAN : 1.0; })}));
  EXPECT_THROW(apply(shard, 0, {{0.25}}), InvalidArgument);
  EXPECT_EQ(values_of(shard), Values{1});
  fails = false;
  EXPECT_TRUE(apply(shard, 0, {{0.25}}));
  EXPECT_EQ(values_of(shard), Values{0.75});
  expect_says(message_of<InvalidArgument>([] { shard_of({1}, SGD({.global_clipnorm = 1})); }), "global_clipnorm");
}

TEST(Shard, ThreadsThatPushTheSameStepsApplyEachOnce) {
  constexpr int kThreads = 4, kSteps = 200;
  auto shard = shard_of(Values(100), SGD({.learning_rate = 1}));
  std::atomic<int> applied = 0;
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&] {
        for (int step = 0; step < kSteps; ++step) applied += apply(shard, step, {Values(100, -1)}) ? 1 : 0;
      });
    }
    for (int i = 0; i < 100; ++i) {  // every reader sees whole updates
      const auto seen = values_of(shard);
      EXPECT_EQ(seen, Values(100, seen[0]));
    }
  }
  EXPECT_EQ(applied, kSteps);
  EXPECT_EQ(values_of(shard), Values(100, kSteps));
}

TEST(Shard, ValuesThatAReaderHasAreNotCopied) {
  const SGD sgd({.learning_rate = 1});
  auto shard = shard_of({0}, sgd);
  double value = 0;
  const auto read = [&](std::int64_t known) { return shard.read(reinterpret_cast<std::byte*>(&value), known); };
  const auto first = read(Shard::kNoVersion);
  EXPECT_NE(first, Shard::kNoVersion);
  value = 7;
  EXPECT_EQ(read(first), first);
  EXPECT_EQ(value, 7);
  apply(shard, 0, {});  // moves nothing
  EXPECT_EQ(read(first), first);
  apply(shard, 1, {{-2}});
  const auto second = read(first);
  EXPECT_NE(second, first);
  EXPECT_EQ(value, 2);
  shard.write(reinterpret_cast<const std::byte*>(&value));
  const auto third = read(second);
  shard.cut(2);
  shard.restore(*shard.take_cut(2), 2);
  const auto fourth = read(third);
  EXPECT_EQ((std::set{first, second, third, fourth}).size(), 4U);
  EXPECT_NE(shard_of({0}, sgd).read(reinterpret_cast<std::byte*>(&value)), first);  // as of one that is started again
}

// A checkpoint of a moment, which steps that had begun reach later than steps that had not.
TEST(Shard, ACutHasTheStepsBeforeItAndNoOthers) {
  const SGD sgd({.learning_rate = 1});
  auto shard = shard_of({0}, sgd), restored = shard_of({0}, sgd);
  EXPECT_FALSE(shard.take_cut(4));
  apply(shard, 0, {{-1}});
  apply(shard, 2, {{-4}});
  shard.cut(4);
  apply(shard, 5, {{-32}});
  apply(shard, 1, {{-2}});
  apply(shard, 1, {{-2}});
  apply(shard, 4, {{-16}});
  apply(shard, 3, {{-8}});
  const auto state = shard.take_cut(4);
  EXPECT_EQ(values_of(shard), Values{63});
  ASSERT_TRUE(state);
  restored.restore(*state, 4);
  EXPECT_EQ(values_of(restored), Values{15});
  EXPECT_FALSE(apply(restored, 3, {{-8}}));
  EXPECT_TRUE(apply(restored, 4, {{-16}}));
  EXPECT_FALSE(shard.take_cut(4));  // it was taken

  // These steps come no more: nobody computes them.
  shard.cut(9);
  EXPECT_TRUE(shard.take_cut(8));
  EXPECT_FALSE(apply(shard, 7, {{-128}}));
  EXPECT_TRUE(apply(shard, 8, {{-256}}));
}

TEST(Shard, GoesOnFromASavedStateBitForBit) {
  const Adam adam({.learning_rate = 0.01});
  auto first = shard_of({1, 2}, adam), second = shard_of({0, 0}, adam);
  for (int step = 0; step < 3; ++step) apply(first, step, {{0.5, -1.0 / (step + 1)}});
  first.cut(3);
  second.restore(*first.take_cut(3), 3);
  for (auto* const shard : {&first, &second}) {
    EXPECT_FALSE(apply(*shard, 2, {{1, 1}}));
    EXPECT_TRUE(apply(*shard, 3, {{0.1, 0.2}}));
  }
  EXPECT_EQ(values_of(first), values_of(second));
  EXPECT_EQ(first.steps(), second.steps());
  expect_says(message_of<InvalidArgument>([&] { second.restore({}, 0); }), "2 x float64 with 2 arrays of state");
}

}  // namespace
}  // namespace lockstep::parameter_server
