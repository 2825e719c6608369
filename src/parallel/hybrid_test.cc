// Compares products of the axes of a mesh with one process that trains the whole model on the whole batch, in double
// precision. Covers frozen and tied parameters, clipping, and batches that ranks and microbatches do not divide.
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "collective/on_ranks_testing.h"
#include "lockstep/parallel.h"
#include "parallel/divided_parameter.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

constexpr int kHybridSteps = 50;
constexpr double kTolerance = 1e-9, kMaxNorm = 0.5;
const TransformerOptions kOptions{.layers = 2, .tied = true};

void freeze_some(const torch::nn::Module& module) {
  for (const auto& each : module.named_parameters()) {
    if (each.key() == "1.norm1.weight" || each.key() == "2.up.weight") each.value().set_requires_grad(false);
  }
}

Batch batch_of(int step) { return make_batch(step, 9 + step % 2, kOptions); }

Parameters train_whole() {
  auto net = make_transformer(kOptions);
  freeze_some(*net);
  const auto parameters = trained_parameters(*net);
  torch::optim::AdamW adamw(parameters, torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kHybridSteps; ++step) {
    const auto batch = batch_of(step);
    adamw.zero_grad();
    cross_entropy(net->forward(batch.ids), batch.labels).backward();
    torch::nn::utils::clip_grad_norm_(parameters, kMaxNorm);
    adamw.step();
  }
  return parameters_of(*net);
}

ParallelPlan plan() {
  return {{"*.token", RowwiseParallel()}, {"*.qkv", ColwiseParallel()},  {"*.out", RowwiseParallel()},
          {"*.up", ColwiseParallel()},    {"*.down", RowwiseParallel()}, {"*.head", ColwiseParallel()}};
}

// The patterns that fit a stage.
ParallelPlan plan_of(const torch::nn::Module& stage) {
  auto all = plan();
  std::erase_if(all, [&](const auto& entry) {
    const auto modules = stage.named_modules("", /*include_self=*/false);
    return std::none_of(modules.begin(), modules.end(),
                        [&](const auto& each) { return each.key().ends_with(entry.first.substr(1)); });
  });
  return all;
}

struct Sizes {
  int data, pipeline, tensor;
};

void train_split(const Sizes& sizes, const Group& group, const Parameters& expected) {
  const DeviceMesh mesh({{"data", sizes.data}, {"pipeline", sizes.pipeline}, {"tensor", sizes.tensor}},
                        Communicator(group, 30));
  std::vector<PipelineStage> stages;
  for (int i = 0; i < sizes.pipeline; ++i) {
    stages.emplace_back([&mesh, i, count = sizes.pipeline] {
      auto stage = make_transformer(kOptions, i, count);
      freeze_some(*stage);
      parallelize_module(stage, mesh["tensor"], plan_of(*stage));
      return stage;
    });
  }
  const StageParameter token{0, "0.token.weight"}, head{sizes.pipeline - 1, "3.head.weight"};
  PipelineOptions options{.schedule = schedules::zero_bubble, .microbatches = 3};
  if (sizes.pipeline > 1) options.tied = {{token, head}};
  Pipeline pipeline(stages, mesh["pipeline"], options);
  std::vector<at::Tensor> parameters;
  for (const auto& [stage, module] : pipeline.modules()) parameters = trained_parameters(*module);
  torch::optim::AdamW adamw(parameters, torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kHybridSteps; ++step) {
    const auto batch = batch_of(step);
    const auto ids = batch.ids.tensor_split(sizes.data)[mesh.coordinate("data")];
    const auto labels = batch.labels.tensor_split(sizes.data)[mesh.coordinate("data")];
    adamw.zero_grad();
    pipeline.step(ids, labels, [&](const at::Tensor& logits, const at::Tensor& target) {
      return vocabulary_parallel_cross_entropy(logits, target, mesh["tensor"]).mean();
    });
    average_gradients(parameters, mesh["data"], static_cast<double>(ids.size(0)));
    clip_grad_norm(parameters, kMaxNorm, mesh["pipeline"]);
    adamw.step();
  }
  for (const auto& [stage, module] : pipeline.modules()) {
    auto whole = parameters_of(*module);
    for (auto& [name, parameter] : whole) parameter = full_tensor(parameter);
    EXPECT_LT(largest_difference(whole, expected), kTolerance);
  }
}

struct ShardSizes {
  int replicas, shards, tensor;
  bool reshard_after_forward = true, prefetch = false;
};

void train_sharded(const ShardSizes& sizes, const Group& group, const Parameters& expected) {
  const DeviceMesh mesh({{"data", sizes.replicas}, {"shard", sizes.shards}, {"tensor", sizes.tensor}},
                        Communicator(group, 30));
  auto net = make_transformer(kOptions);
  freeze_some(*net);
  parallelize_module(net, mesh["tensor"], plan());
  auto sharded = fully_shard(net, mesh["shard"],
                             {.units = {"1", "2"},
                              .reshard_after_forward = sizes.reshard_after_forward,
                              .replicas = mesh["data"],
                              .prefetch = sizes.prefetch});
  torch::optim::AdamW adamw(sharded.parameters(), torch::optim::AdamWOptions(1e-2));
  const auto parts = sizes.replicas * sizes.shards;
  const auto part = static_cast<std::size_t>(mesh.coordinate("data") * sizes.shards + mesh.coordinate("shard"));
  for (int step = 0; step < kHybridSteps; ++step) {
    const auto batch = batch_of(step);
    adamw.zero_grad();
    const auto logits = sharded(batch.ids.tensor_split(parts)[part]);
    vocabulary_parallel_cross_entropy(logits, batch.labels.tensor_split(parts)[part], mesh["tensor"]).mean().backward();
    sharded.clip_grad_norm(kMaxNorm);
    adamw.step();
  }
  const auto values = sharded.gather();
  if (mesh.coordinate("shard") != 0) return;
  auto whole = parameters_of(*net);
  for (auto& [name, parameter] : whole) {
    const auto division = division_of(parameter);
    const auto& value = values.contains(name) ? values.at(name) : values.at("0.token.weight");
    parameter = division != nullptr ? division->whole(value) : value;
  }
  EXPECT_LT(largest_difference(whole, expected), kTolerance);
}

TEST(Hybrid, ShardedTrainsAsOneProcess) {
  const auto expected = train_whole();
  for (const auto& sizes :
       {ShardSizes{1, 1, 1}, ShardSizes{1, 2, 1}, ShardSizes{1, 3, 1}, ShardSizes{1, 4, 1, false}, ShardSizes{1, 2, 2},
        ShardSizes{2, 2, 1}, ShardSizes{1, 4, 1, true, true}, ShardSizes{2, 2, 2}}) {
    SCOPED_TRACE(testing::Message() << sizes.replicas << " x " << sizes.shards << " x " << sizes.tensor);
    collective::on_ranks(sizes.replicas * sizes.shards * sizes.tensor,
                         [&](const Group& group) { train_sharded(sizes, group, expected); });
  }
}

TEST(Hybrid, TrainsAsOneProcess) {
  const auto expected = train_whole();
  for (const auto& sizes : {Sizes{2, 1, 1}, Sizes{3, 1, 1}, Sizes{1, 2, 1}, Sizes{2, 1, 2}, Sizes{2, 2, 1},
                            Sizes{1, 2, 2}, Sizes{2, 2, 2}}) {
    SCOPED_TRACE(testing::Message() << sizes.data << " x " << sizes.pipeline << " x " << sizes.tensor);
    collective::on_ranks(sizes.data * sizes.pipeline * sizes.tensor,
                         [&](const Group& group) { train_split(sizes, group, expected); });
  }
}

}  // namespace
}  // namespace lockstep::parallel
