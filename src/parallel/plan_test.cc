// Plans that are measured, and models that are trained by them. Ranks are threads.
#include "lockstep/parallel/plan.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <mutex>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/ops/memory.h"
#include "parallel/mesh_backend.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

const TransformerOptions kSmall{.layers = 3};
const ParallelPlan kTensor{{"*.token", RowwiseParallel()}, {"*.qkv", ColwiseParallel()},
                           {"*.out", RowwiseParallel()},   {"*.up", ColwiseParallel()},
                           {"*.down", RowwiseParallel()},  {"*.head", ColwiseParallel()}};

// Initial values come from the process's generator.
std::mutex& making() {
  static std::mutex mutex;
  return mutex;
}

// Returns layers with the same values at each call, in double precision; threads may call.
std::vector<PipelineStage> layers_of(const TransformerOptions& options) {
  std::vector<PipelineStage> layers;
  const auto add = [&](const auto& make) {
    layers.emplace_back([=, number = layers.size()] {
      const std::lock_guard lock(making());
      torch::manual_seed(number);
      auto layer = make();
      layer->to(at::kDouble);
      return layer;
    });
  };
  add([=] { return std::make_shared<FrontImpl>(options); });
  for (std::int64_t i = 0; i < options.layers; ++i) add([=] { return std::make_shared<BlockImpl>(options); });
  add([=] { return std::make_shared<BackImpl>(options, at::Tensor()); });
  return layers;
}

at::Tensor vocabulary_loss(const at::Tensor& logits, const at::Tensor& labels, const Communicator& tensor) {
  return vocabulary_parallel_cross_entropy(logits, labels, tensor).mean();
}

at::Tensor mean_of(const at::Tensor& y, const at::Tensor& /*target*/, const Communicator& /*tensor*/) {
  return y.mean();
}

std::string error_of(const PlanOptions& options, const at::Tensor& x, const at::Tensor& y, std::size_t layers = 3,
                     int ranks = 2) {
  std::string said;
  collective::on_ranks(ranks, [&](const Group& group) {
    auto some = layers_of({.layers = 1});
    some.resize(layers, some[0]);
    const auto message =
        message_of<InvalidArgument>([&] { plan_parallel(some, x, y, vocabulary_loss, group, options); });
    if (group.rank() == 0) said = message;
  });
  EXPECT_EQ(said.find('\n'), std::string::npos) << said;
  return said;
}

TEST(Plan, BadInputIsOneClearLine) {
  const auto [x, y] = make_batch(0, 4, kSmall);
  expect_says(error_of({}, x, y, 0), "plan_parallel: there are no layers");
  expect_says(error_of({.ranks = -1}, x, y), "ranks is -1; it must be above 0");
  expect_says(error_of({.ranks = 1}, x, y), "ranks is 1, but 2 measure");
  expect_says(error_of({.ranks = 2}, x, y, 3, 1), "one rank cannot measure what 2 would communicate");
  expect_says(error_of({}, x.narrow(0, 0, 0), y), "x has no examples");
  expect_says(error_of({}, x, y.narrow(0, 0, 3)), "x has 4 examples, and target 3");
  expect_says(error_of({.microbatches = {0}}, x, y), "a number of microbatches is 0");
  expect_says(error_of({}, x.narrow(0, 0, 3), y.narrow(0, 0, 3), 1), "data 2 does not divide a batch of 3 examples");
  expect_says(error_of({.tensor = {{"*.keys", ColwiseParallel()}}}, x, y), "\"*.keys\" matches nothing in any layer");
}

TEST(Plan, EveryCandidateTrainsAsTheUnsplitModel) {
  const auto batch = make_batch(0, 8, kSmall);
  std::vector<double> expected;
  const auto losses = [&](const Group& group, const Split& split) {
    const DeviceMesh mesh(split.axes(), Communicator(group, 60));
    SplitModel model(layers_of(kSmall), split, mesh, kTensor);
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1));
    std::vector<double> values;
    for (int step = 0; step < 4; ++step) {
      sgd.zero_grad();
      values.push_back(model.step(batch.ids, batch.labels, vocabulary_loss));
      model.clip_grad_norm(0.5);
      sgd.step();
    }
    return values;
  };
  collective::on_ranks(1, [&](const Group& group) { expected = losses(group, {}); });
  EXPECT_LT(expected[3], expected[0]);
  for (const int ranks : {2, 4}) {
    collective::on_ranks(ranks, [&](const Group& group) {
      const auto plan = plan_parallel(layers_of(kSmall), batch.ids, batch.labels, vocabulary_loss, group,
                                      {.tensor = kTensor, .microbatches = {1, 2, 4}});
      EXPECT_GE(plan.candidates.size(), 9U);
      for (const auto& each : plan.candidates) {
        SCOPED_TRACE(each.split.describe());
        if (!each.refused.empty()) {
          EXPECT_EQ(each.split.tensor, 4);  // of 12 heads of two features, and 48 classes
          continue;
        }
        EXPECT_GT(each.seconds, 0);
        EXPECT_FALSE(each.is_computed);
        const auto values = losses(group, each.split);
        for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(values[i], expected[i], 1e-9);
      }
    });
  }
}

TEST(Plan, RanksAgreeAndTheRandomGeneratorIsLeftAsItWas) {
  const auto batch = make_batch(0, 4, kSmall);
  std::vector<std::string> tables(2);
  collective::on_ranks(2, [&](const Group& group) {
    const auto plan = plan_parallel(layers_of(kSmall), batch.ids, batch.labels, vocabulary_loss, group);
    tables[static_cast<std::size_t>(group.rank())] = plan.table();
  });
  EXPECT_EQ(tables[0], tables[1]);
  collective::on_ranks(1, [&](const Group& group) {
    std::vector<PipelineStage> layers{[] { return std::make_shared<FrontImpl>(kSmall); },
                                      [] { return std::make_shared<BackImpl>(kSmall, at::Tensor()); }};
    torch::manual_seed(1);
    const auto expected = at::rand({3});
    torch::manual_seed(1);
    plan_parallel(layers, batch.ids, batch.labels, vocabulary_loss, group);
    EXPECT_TRUE(at::rand({3}).equal(expected));
  });
}

TEST(Plan, MoreRanksThanMeasureAreComputed) {
  const auto batch = make_batch(0, 8, kSmall);
  collective::on_ranks(2, [&](const Group& group) {
    const auto plan = plan_parallel(layers_of(kSmall), batch.ids, batch.labels, vocabulary_loss, group,
                                    {.ranks = 4, .tensor = kTensor, .microbatches = {1, 4}});
    for (const auto& each : plan.candidates) {
      SCOPED_TRACE(each.split.describe());
      EXPECT_TRUE(each.refused.empty());
      EXPECT_GT(each.seconds, 0);
      const bool is_measured = each.split.data <= 2 && each.split.tensor <= 2 &&
                               (each.split.sharding == Sharding::none || each.split.tensor == 1);
      EXPECT_EQ(each.is_computed, !is_measured);
    }
    expect_says(plan.table(100), "* has costs of more ranks than measured");
  });
}

TEST(Plan, ALayerThatCannotBeDividedRefusesTheAxis) {
  const TransformerOptions odd{.layers = 1, .width = 6, .head = 2};
  const auto batch = make_batch(0, 4, odd);
  collective::on_ranks(2, [&](const Group& group) {
    const auto plan =
        plan_parallel(layers_of(odd), batch.ids, batch.labels, vocabulary_loss, group, {.tensor = kTensor});
    EXPECT_EQ(plan.candidates.back().split.tensor, 2);
    EXPECT_NE(plan.candidates.back().refused, "");
    EXPECT_TRUE(plan.best().refused.empty());
  });
}

struct FailsInTrainingImpl : torch::nn::Module {
  explicit FailsInTrainingImpl(bool in_training) : fails(in_training) {
    up = register_module("up", torch::nn::Linear(8, 8));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (fails && at::GradMode::is_enabled()) throw std::runtime_error("this rank has failed");
    return up(x);
  }

  const bool fails;
  torch::nn::Linear up = nullptr;
};

TEST(Plan, AnErrorOnOneRankEndsAll) {
  const auto x = at::ones({4, 8});
  collective::on_ranks(2, [&](const Group& group) {
    const std::vector<PipelineStage> layers(
        2, [fails = group.rank() == 1] { return std::make_shared<FailsInTrainingImpl>(fails); });
    const PlanOptions options{.tensor = {{"*.up", ColwiseParallel{.output = Replicate()}}}};
    std::string said;
    try {
      plan_parallel(layers, x, x, mean_of, {group, 60}, options);
    } catch (const std::exception& error) {
      said = error.what();
    }
    expect_says(said, "this rank has failed");
  });
}

// A layer that throws on one rank where it is divided over ranks.
struct FailsDividedImpl : FailsInTrainingImpl {
  explicit FailsDividedImpl(bool divided) : FailsInTrainingImpl(false), fails_divided(divided) {}
  at::Tensor forward(const at::Tensor& x) {
    if (fails_divided && up->weight.size(0) < 8) throw std::runtime_error("this rank is short of memory");
    return up(x);
  }

  const bool fails_divided;
};

TEST(Plan, WhatOneRankRefusesAllDo) {
  const auto x = at::ones({4, 8});
  std::vector<std::string> tables(2);
  collective::on_ranks(2, [&](const Group& group) {
    const std::vector<PipelineStage> layers(
        2, [fails = group.rank() == 1] { return std::make_shared<FailsDividedImpl>(fails); });
    const PlanOptions options{.tensor = {{"*.up", ColwiseParallel{.output = Replicate()}}}};
    const auto plan = plan_parallel(layers, x, x, mean_of, {group, 60}, options);
    EXPECT_EQ(plan.candidates.back().split.tensor, 2);
    EXPECT_EQ(plan.candidates.back().refused, "this rank is short of memory");
    EXPECT_TRUE(plan.best().refused.empty());
    tables[static_cast<std::size_t>(group.rank())] = plan.table();
  });
  EXPECT_EQ(tables[0], tables[1]);
}

TEST(Plan, FrozenParametersAreNotTrained) {
  const auto x = at::ones({4, 8});
  collective::on_ranks(2, [&](const Group& group) {
    const auto layer = [](bool frozen) {
      return PipelineStage([frozen] {
        auto module = std::make_shared<FailsInTrainingImpl>(false);
        for (auto& each : module->parameters()) each.set_requires_grad(!frozen);
        return module;
      });
    };
    const auto plan = plan_parallel({layer(true), layer(true), layer(false)}, x, x, mean_of, {group, 60});
    for (const auto& each : plan.candidates) {
      if (each.split.data == 1 || each.split.sharding != Sharding::none) continue;
      constexpr double kBytes = 4 * (8 * 8 + 8);
      EXPECT_EQ(each.memory.parameters, 3 * kBytes);
      EXPECT_EQ(each.memory.gradients, kBytes);
      EXPECT_EQ(each.memory.optimizer, 2 * kBytes);
    }
  });
}

// A layer whose states fit on no rank as a whole can be sharded.
TEST(Plan, ALayerIsMeasuredWithoutTheOptimizersStates) {
  const auto x = at::ones({4, 256});
  constexpr double kBytes = 4 * (256 * 256 + 256);
  collective::on_ranks(2, [&](const Group& group) {
    const std::vector<PipelineStage> layers{[] { return torch::nn::Linear(256, 256); }};
    const PlanOptions options{.memory_bytes = 15 * kBytes, .optimizer_states = 16};
    const auto plan = plan_parallel(layers, x, x, mean_of, {group, 60}, options);
    ASSERT_EQ(plan.candidates.size(), 3U);
    for (const auto& each : plan.candidates) {
      SCOPED_TRACE(each.split.describe() + ": " + each.refused);
      EXPECT_EQ(each.refused.empty(), each.split.sharding != Sharding::none);
      EXPECT_GT(each.memory.total(), 10 * kBytes);
    }
    expect_says(plan.candidates.back().refused, "needs ");
  });
}

TEST(Plan, ARankWithoutAPartOfASmallLayerTakesPart) {
  const auto x = at::ones({8, 4});
  collective::on_ranks(4, [&](const Group& group) {
    const std::vector<PipelineStage> layers{[] { return torch::nn::Linear(4, 4); },
                                            [] { return torch::nn::Linear(4, 1); }};
    const auto plan = plan_parallel(layers, x, x, mean_of, {group, 60});
    for (const auto& each : plan.candidates) EXPECT_EQ(each.refused, "") << each.split.describe();
  });
}

// Compares the plan with the bytes of a real training, by the allocator.
TEST(Plan, MemoryIsWhatTheAllocatorCounts) {
  if (memory_stats().reserved_bytes == 0) return;  // LibTorch's own counts nothing
  const TransformerOptions options{.layers = 6, .width = 128, .head = 32, .sequence = 64};
  const auto batch = make_batch(0, 8, options);
  collective::on_ranks(1, [&](const Group& group) {
    for (const int microbatches : {1, 4}) {
      const auto plan = plan_parallel(layers_of(options), batch.ids, batch.labels, vocabulary_loss, group,
                                      {.microbatches = {microbatches}, .optimizer_states = 1});
      release_memory();
      const auto before = static_cast<double>(memory_stats().reserved_bytes);
      const DeviceMesh mesh(plan.best().split.axes(), group);
      SplitModel model(layers_of(options), plan.best().split, mesh);
      torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 3; ++step) {
        sgd.zero_grad();
        model.step(batch.ids, batch.labels, vocabulary_loss);
        sgd.step();
      }
      const auto counted = static_cast<double>(memory_stats().reserved_bytes) - before;
      EXPECT_NEAR(plan.best().memory.total() / counted, 1, 0.15) << microbatches << " microbatches\n" << plan.table();
    }
  });
}

TEST(Rehearsal, HasTheShapesOfARealGroup) {
  Rehearsal rehearsal(3);
  const auto& ranks = rehearsal.ranks();
  EXPECT_EQ(ranks.size(), 3);
  EXPECT_EQ(ranks.all_gather("mine"), (std::vector<std::string>(3, "mine")));
  EXPECT_EQ(ranks.broadcast("text"), "text");
  rehearsal.take();
  std::vector<float> input{1, 2}, output(6), part(2);
  ranks.group().all_gather(buffer_of(input), buffer_of(output), ranks.deadline());
  EXPECT_EQ(output, (std::vector<float>{1, 2, 1, 2, 1, 2}));
  ranks.group().reduce_scatter(buffer_of(output), buffer_of(part), ReduceOp::sum, ranks.deadline());
  EXPECT_EQ(part, input);
  ranks.group().all_reduce(buffer_of(part), ReduceOp::sum, ranks.deadline());
  const auto counted = rehearsal.take();
  ASSERT_EQ(counted.size(), 3U);
  EXPECT_EQ(counted[0].kind, Call::Kind::all_gather);
  EXPECT_EQ(counted[0].bytes, 24);
  EXPECT_EQ(counted[1].bytes, 24);
  EXPECT_EQ(counted[2].bytes, 8);
  EXPECT_TRUE(rehearsal.take().empty());
}

}  // namespace
}  // namespace lockstep::parallel
