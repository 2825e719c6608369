#include "lockstep/parallel/cut_stages.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/ops/memory.h"
#include "lockstep/parallel/moe.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

std::vector<LayerCost> costs_of(const std::vector<double>& seconds) {
  std::vector<LayerCost> costs;
  for (const double each : seconds) costs.push_back({.seconds = each});
  return costs;
}

double slowest(const std::vector<double>& seconds, const std::vector<int>& counts) {
  double most = 0;
  std::size_t next = 0;
  for (const int count : counts) {
    double sum = 0;
    for (int i = 0; i < count; ++i) sum += seconds[next++];
    most = std::max(most, sum);
  }
  return most;
}

TEST(CutStages, NoOtherCutIsFaster) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    std::vector<double> seconds(8);
    for (double& each : seconds) each = 1.0 + static_cast<double>(random() % 9);
    const auto cut = cut_stages(costs_of(seconds), 3);
    EXPECT_EQ(cut.size(), 3U);
    double least = 1e9;
    for (int a = 1; a <= 6; ++a) {
      for (int b = 1; a + b <= 7; ++b) least = std::min(least, slowest(seconds, {a, b, 8 - a - b}));
    }
    EXPECT_DOUBLE_EQ(slowest(seconds, cut), least);
  }
}

TEST(CutStages, KeepsTheBoundOfMemory) {
  auto costs = costs_of({1, 1, 1, 1});
  for (auto& cost : costs) cost.activation_bytes = 10;
  EXPECT_EQ(cut_stages(costs, 2), (std::vector{2, 2}));
  // The first stage keeps the activations of two microbatches.
  EXPECT_EQ(cut_stages(costs, 2, {.most_bytes = 30}), (std::vector{1, 3}));
  expect_says(message_of<InvalidArgument>([&] { cut_stages(costs, 2, {.most_bytes = 20}); }),
              "no cut into 2 stages keeps each below");
  for (auto& cost : costs) cost.parameter_bytes = 10;
  EXPECT_EQ(cut_stages(costs, 2, {.most_bytes = 120}), (std::vector{2, 2}));
  EXPECT_EQ(cut_stages(costs, 2, {.most_bytes = 60, .parameter_copies = 1}), (std::vector{2, 2}));
}

TEST(CutStages, RefusesMoreStagesThanLayers) {
  expect_says(message_of<InvalidArgument>([] { cut_stages(costs_of({1, 1}), 3); }), "2 layers for 3 stages");
  expect_says(message_of<InvalidArgument>([] { join_layers({}, {1}); }), "stages of 1 layers, of 0 layers");
}

TEST(CutStages, MeasuredLayersMakeAPipelineThatIsTheModel) {
  const TransformerOptions options{.layers = 3};
  std::vector<PipelineStage> layers{[=] { return std::make_shared<FrontImpl>(options); }};
  for (int i = 0; i < 3; ++i) layers.emplace_back([=] { return std::make_shared<BlockImpl>(options); });
  layers.emplace_back([=] { return std::make_shared<BackImpl>(options, at::Tensor()); });
  const auto batch = make_batch(0, 4, options);
  torch::manual_seed(6);
  Transformer whole(options, 0, 5);
  const auto expected = whole(batch.ids);
  collective::on_ranks(1, [&](const Group& group) {
    torch::manual_seed(6);
    const auto costs = measure_layers(layers, batch.ids, group);
    for (std::size_t i = 1; i < 4; ++i) {
      EXPECT_GT(costs[i].seconds, costs[0].seconds);
      EXPECT_TRUE(memory_stats().reserved_bytes == 0 || costs[i].activation_bytes > costs[0].activation_bytes);
      EXPECT_EQ(costs[i].parameter_bytes, costs[1].parameter_bytes);
    }
    Pipeline pipeline(join_layers(layers, {5}), group, {});
    EXPECT_TRUE(pipeline.forward(batch.ids).equal(expected));  // the same initial values
    EXPECT_EQ(pipeline.modules()[0].second->named_parameters().keys(), whole->named_parameters().keys());
  });
}

TEST(MeasureLayers, RefusesExpertsOfOtherRanks) {
  collective::on_ranks(2, [&](const Group& group) {
    const std::vector<PipelineStage> layers{[&] {
      return MoE(
          {.experts = 2}, kExpertWidth, [] { return Expert(); }, Communicator(group, 30));
    }};
    expect_says(message_of([&] {
                  measure_layers(layers, at::zeros({2, kExpertWidth}), {group, 30});
                }),
                "a layer has experts on several ranks");
  });
}

}  // namespace
}  // namespace lockstep::parallel
