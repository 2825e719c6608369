// Tensor parallelism against one process that trains the whole module, in double precision.
#include "lockstep/parallel/tensor_parallel.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/parallel/device_mesh.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

constexpr int kSteps = 50;
constexpr double kTolerance = 1e-9;

ParallelPlan plain_plan() {
  return {{"*.token", RowwiseParallel()}, {"*.qkv", ColwiseParallel()},  {"*.out", RowwiseParallel()},
          {"*.up", ColwiseParallel()},    {"*.down", RowwiseParallel()}, {"*.head", ColwiseParallel()}};
}

// Between the layers the sequence is divided.
ParallelPlan sequence_plan() {
  const Layout sequence = Shard{1};
  return {{"*.token", RowwiseParallel{.output = sequence}},
          {"*.place", SequenceParallel()},
          {"*.norm*", SequenceParallel()},
          {"*.qkv", ColwiseParallel{.input = sequence}},
          {"*.out", RowwiseParallel{.output = sequence}},
          {"*.up", ColwiseParallel{.input = sequence}},
          {"*.down", RowwiseParallel{.output = sequence}},
          {"*.head", ColwiseParallel{.input = sequence}}};
}

template <class Loss>
void train(Transformer& net, const Loss& loss) {
  torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    const auto batch = make_batch(step, 3 + step % 2);
    adamw.zero_grad();
    loss(net(batch.ids), batch.labels).backward();
    adamw.step();
  }
}

Parameters train_whole() {
  auto net = make_transformer();
  train(net, cross_entropy);
  return parameters_of(*net);
}

void expect_as_whole(int ranks, const ParallelPlan& plan) {
  const auto expected = train_whole();
  collective::on_ranks(ranks, [&](const Group& group) {
    const Communicator communicator(group, 30);
    auto net = make_transformer();
    parallelize_module(net, communicator, plan);
    train(net, [&](const at::Tensor& logits, const at::Tensor& labels) {
      return vocabulary_parallel_cross_entropy(logits, labels, communicator).mean();
    });
    auto whole = parameters_of(*net);
    for (auto& [name, parameter] : whole) parameter = full_tensor(parameter);
    EXPECT_LT(largest_difference(whole, expected), kTolerance);
  });
}

TEST(TensorParallel, TrainsAsOneProcess) {
  for (const int ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(ranks);
    expect_as_whole(ranks, plain_plan());
  }
}

TEST(TensorParallel, TrainsAsOneProcessWithTheSequenceDivided) {
  for (const int ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(ranks);
    expect_as_whole(ranks, sequence_plan());
  }
}

}  // namespace
}  // namespace lockstep::parallel
