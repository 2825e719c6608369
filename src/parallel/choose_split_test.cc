// The choice of a split as a function of costs: no clock, no ranks.
#include "parallel/choose_split.h"

#include <gtest/gtest.h>

#include "base/expect_says_testing.h"

namespace lockstep::parallel {
namespace {

constexpr double kMiB = 1 << 20;

// Equal layers. A rank sends `link` bytes a second, and waits `latency` seconds for each message.
struct Synthetic {
  double parameters = kMiB, activations = 1000;  // bytes; activations of an example
  double example = 1e-3;                         // seconds: forward; each half of backward takes as long
  double link = 1e9, latency = 1e-5;
};

LinkTimes link_of(const Synthetic& costs) {
  return {.ranks = 2, .seconds = {{0, costs.latency}, {1e6, costs.latency + 1e6 / costs.link}}};
}

Profile profile_of(const PlanInput& input, const Synthetic& costs) {
  Profile profile;
  const auto needs = needs_of(input);
  const auto link = link_of(costs);
  for (const auto& [division, examples] : needs.divisions) {
    LayerProfile layer{.parameter_bytes = costs.parameters / division.tensor,
                       .trained_bytes = costs.parameters / division.tensor,
                       .update_seconds = 1e-10 * costs.parameters / division.tensor / division.shards};
    for (const auto count : examples) {
      const auto n = static_cast<double>(count);
      const double each = costs.example * n / division.tensor;
      const double sums = division.tensor > 1 ? 2 * link.at(costs.activations * n, division.tensor) : 0;
      const double gather = division.shards > 1 ? link.at(costs.parameters, division.shards) : 0;
      layer.times[count] = {each + sums + gather, each + sums + 2 * gather, each, 0};
      if (division.sharding != Sharding::none) layer.times[count] = {each + gather, 2 * each + 2 * gather, 0, 0};
      layer.bytes[count] = {.activations = costs.activations * n, .working = 0, .input = 100 * n, .output = 100 * n};
    }
    profile.divisions[division].layers.assign(input.layers, layer);
  }
  for (const int ranks : needs.data_axes) profile.averages[ranks] = link;
  for (const int ranks : needs.tensor_axes) profile.messages[ranks] = link;
  return profile;
}

const ParallelPlan kPatterns{{"*.up", ColwiseParallel()}};

SplitPlan plan_with(const PlanInput& input, const Synthetic& costs) {
  return choose_split(input, profile_of(input, costs));
}

const PlannedSplit& candidate(const SplitPlan& plan, const std::string& begin) {
  for (const auto& each : plan.candidates) {
    if (each.split.describe().starts_with(begin)) return each;
  }
  throw InvalidArgument("there is no candidate " + begin);
}

TEST(ChooseSplit, SmallModelsDivideTheBatch) {
  const PlanOptions options{.tensor = kPatterns};
  const auto plan = plan_with({4, 8, 64, options}, {.parameters = 1000, .activations = 1e6});
  EXPECT_EQ(plan.best().split.data, 4);
  EXPECT_EQ(plan.best().split.sharding, Sharding::none);
}

TEST(ChooseSplit, LargeModelsOverSlowLinksArePipelined) {
  const PlanOptions options{.tensor = kPatterns};
  const auto plan = plan_with({2, 8, 64, options}, {.parameters = 100 * kMiB, .activations = 1e6, .link = 1e8});
  EXPECT_EQ(plan.best().split.pipeline, 2);
  EXPECT_GT(plan.best().split.microbatches, 1);
  EXPECT_GT(candidate(plan, "data 2").seconds, plan.best().seconds + 2);  // 8 layers of 100 MiB at 100 MB/s
}

TEST(ChooseSplit, FewExamplesAreDividedWithinLayers) {
  const PlanOptions options{.tensor = kPatterns};
  const auto plan = plan_with({2, 8, 1, options}, {.example = 0.1});
  EXPECT_EQ(plan.best().split.tensor, 2);
  EXPECT_EQ(candidate(plan, "data 2").refused, "data 2 does not divide a batch of 1 examples");
}

TEST(ChooseSplit, WhatDoesNotFitIsRefused) {
  const Synthetic costs{.parameters = 10 * kMiB};
  const PlanOptions options{.memory_bytes = 200 * kMiB, .microbatches = {4}};
  const auto plan = plan_with({2, 8, 8, options}, costs);
  const auto& data = candidate(plan, "data 2, 4");
  EXPECT_EQ(data.refused, "needs 320 MiB of 200");
  EXPECT_FALSE(plan.candidates.back().refused.empty());
  EXPECT_TRUE(plan.best().refused.empty());
  EXPECT_EQ(plan.best().split.pipeline, 2);
  expect_says(plan.table(), "refused: needs 320 MiB of 200");
  const PlanOptions less{.memory_bytes = 30 * kMiB};
  const auto none = plan_with({2, 8, 8, less}, costs);
  expect_says(message_of<InvalidArgument>([&] { none.best(); }), "no split can be used; nearest is pipeline 2");
}

TEST(ChooseSplit, MemoryIsOfTheRankThatNeedsMost) {
  const PlanOptions options{.tensor = kPatterns, .microbatches = {4}, .optimizer_states = 2};
  const auto plan = plan_with({2, 8, 8, options}, {.parameters = kMiB});
  const auto expect = [&](const char* name, double parameters, double gradients, double optimizer, double activations) {
    const auto& memory = candidate(plan, name).memory;
    SCOPED_TRACE(name);
    EXPECT_DOUBLE_EQ(memory.parameters, parameters * kMiB);
    EXPECT_DOUBLE_EQ(memory.gradients, gradients * kMiB);
    EXPECT_DOUBLE_EQ(memory.optimizer, optimizer * kMiB);
    EXPECT_DOUBLE_EQ(memory.activations, activations);
  };
  // Microbatches of one example for two data ranks, else of two.
  expect("data 2, 4", 8, 8, 16, 8 * 1000);
  expect("data 2, ZeRO 2", 4 + 8, 4 + 2, 8, 8 * 1000);
  expect("data 2, ZeRO 3", 4 + 1, 4 + 2, 8, 8 * 1000);
  expect("tensor 2", 4, 4, 8, 8 * 2000);
  // The first rank keeps two microbatches of four layers, and the second one; all of them by gpipe, and a stage's
  // input.
  expect("pipeline 2, 1f1b", 4, 4, 8, 2 * 4 * 2000);
  expect("pipeline 2, gpipe", 4, 4, 8, 4 * (4 * 2000 + 200));
}

TEST(ChooseSplit, FrozenParametersHaveNoGradients) {
  const PlanOptions options{.microbatches = {4}};
  const PlanInput input{2, 8, 8, options};
  auto profile = profile_of(input, {.parameters = kMiB});
  const auto trained = choose_split(input, profile);
  for (auto& [division, divided] : profile.divisions) {
    for (std::size_t i = 0; i < 4; ++i) divided.layers[i].trained_bytes = 0;
  }
  const auto plan = choose_split(input, profile);
  const auto expect = [&](const char* name, double parameters, double gradients, double optimizer) {
    const auto& memory = candidate(plan, name).memory;
    SCOPED_TRACE(name);
    EXPECT_DOUBLE_EQ(memory.parameters, parameters * kMiB);
    EXPECT_DOUBLE_EQ(memory.gradients, gradients * kMiB);
    EXPECT_DOUBLE_EQ(memory.optimizer, optimizer * kMiB);
  };
  expect("data 2, 4", 8, 4, 8);
  expect("data 2, ZeRO 2", 4 + 8, 2 + 2, 4);
  expect("data 2, ZeRO 3", 4 + 1, 2 + 2, 4);
  // Gradients of four layers less are averaged, at 1e9 bytes a second.
  EXPECT_NEAR(candidate(trained, "data 2, 4").seconds - candidate(plan, "data 2, 4").seconds, 4e-9 * kMiB, 1e-9);
}

TEST(ChooseSplit, MicrobatchesFillAPipelineAndLessMemory) {
  const PlanOptions options{.memory_bytes = 8 * 4 * kMiB + 12000};
  const auto plan = plan_with({1, 8, 8, options}, {.parameters = kMiB});
  ASSERT_EQ(plan.candidates.size(), 1U);
  EXPECT_EQ(plan.best().split.microbatches, 8);  // activations of one example at a time
}

TEST(ChooseSplit, TheFirstMicrobatchesNearTheFastestAreChosen) {
  const PlanOptions options{.microbatches = {1, 2, 4}};
  const PlanInput input{1, 1, 4, options};
  auto profile = profile_of(input, {});
  auto& layer = profile.divisions.begin()->second.layers[0];
  const auto chosen = [&](double one, double two, double four) {
    layer.times = {{4, {.forward = one}}, {2, {.forward = two / 2}}, {1, {.forward = four / 4}}};
    return choose_split(input, profile).best().split.microbatches;
  };
  EXPECT_EQ(chosen(1, 0.985, 0.979), 2);  // within 2% of the fastest, though not 2% faster than the first
  EXPECT_EQ(chosen(1, 0.995, 0.99), 1);
  EXPECT_EQ(chosen(1, 0.9, 0.8), 4);
}

TEST(ChooseSplit, TheSlowestStageDecidesWhereLayersDiffer) {
  const PlanOptions options{.microbatches = {4}};
  const PlanInput input{2, 4, 8, options};
  auto profile = profile_of(input, {});
  for (auto& [division, divided] : profile.divisions) {
    for (auto& [examples, times] : divided.layers[0].times) times.forward *= 100;
  }
  const auto plan = choose_split(input, profile);
  EXPECT_EQ(candidate(plan, "pipeline 2, 1f1b").split.layers_of_stages, (std::vector{1, 3}));
}

TEST(ChooseSplit, CandidatesAreAllProducts) {
  const PlanOptions options{.tensor = kPatterns};
  const auto plan = plan_with({8, 4, 16, options}, {});
  std::set<std::vector<int>> meshes;
  for (const auto& each : plan.candidates) meshes.insert({each.split.data, each.split.pipeline, each.split.tensor});
  EXPECT_EQ(meshes.size(), 9U);  // of 10; four layers are not eight stages
  for (const auto& each : plan.candidates)
    EXPECT_TRUE(each.split.sharding == Sharding::none || !each.split.schedule_name.starts_with("zero"))
        << each.split.describe();
}

TEST(ChooseSplit, NothingToSplitIsAnError) {
  const PlanOptions options;
  expect_says(message_of<InvalidArgument>([&] {
                needs_of({4, 1, 6, options});
              }),
              "plan_parallel: data 4 does not divide a batch of 6 examples, and nothing else is possible");
}

TEST(ChooseSplit, LinksAreStraightLinesAndRings) {
  const LinkTimes times{.ranks = 2, .seconds = {{100, 1}, {200, 2}, {400, 6}}};
  EXPECT_DOUBLE_EQ(times.at(10, 2), 1);
  EXPECT_DOUBLE_EQ(times.at(150, 2), 1.5);
  EXPECT_DOUBLE_EQ(times.at(600, 2), 10);
  // Four ranks: each sends 3/4 of the bytes in place of 1/2, in three turns in place of one.
  EXPECT_DOUBLE_EQ(times.at(200, 4), times.at(300, 2) + 2);
}

}  // namespace
}  // namespace lockstep::parallel
