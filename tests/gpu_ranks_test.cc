// What `lockstep run -n 2 gpu_ranks_test` runs: ranks that are processes and share a GPU. Fails where there is no GPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/ddp.h>
#include <lockstep/lockstep.h>
#include <lockstep/parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adam.h>

#include "base/expect_says_testing.h"
#include "gradient/replicated_parameters.h"
#include "parallel/transformer_testing.h"
#include "strategy/unwrap.h"

namespace lockstep {
namespace {

using parallel::Transformer;

constexpr int kSteps = 20;
constexpr double kTolerance = 1e-9;

class GpuRanks : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(at::hasCUDA()) << "this machine has no GPU that LibTorch can use";
    ASSERT_EQ(job_.size(), 2) << "run it with `lockstep run -n 2`";
  }

  Communicator ranks() const { return {job_.group(), 60}; }

 private:
  const Job job_ = Job::from_environment(60);
};

struct Batch {
  Tensor ids, labels;
};

Batch batch_of(int step) {
  at::manual_seed(static_cast<std::uint64_t>(step));
  return {at::randint(48, {5, 12}).cuda(), at::randint(48, {5, 12}).cuda()};
}

Transformer on_gpu() {
  auto net = parallel::make_transformer();
  net->to(at::kCUDA);
  return net;
}

template <class Loss>
void train(Transformer& net, const Loss& loss) {
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(1e-3));
  for (int step = 0; step < kSteps; ++step) {
    adam.zero_grad();
    loss(batch_of(step)).backward();
    adam.step();
  }
}

Tensor mean_loss(const Tensor& logits, const Tensor& labels) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), labels.flatten());
}

// Of this process alone, on all examples.
parallel::Parameters trained_alone() {
  auto net = on_gpu();
  train(net, [&](const Batch& batch) { return mean_loss(net(batch.ids), batch.labels); });
  return parallel::parameters_of(*net);
}

void expect_equal(const parallel::Parameters& parameters, const parallel::Parameters& expected) {
  for (const auto& [name, value] : expected) {
    EXPECT_LT((parameters.at(name) - value).abs().max().item<double>(), kTolerance) << name;
  }
}

TEST_F(GpuRanks, DistributedDataParallelTrainsAsOneProcess) {
  const auto group = ranks();
  auto net = on_gpu();
  DistributedDataParallel ddp(net, group);
  train(net, [&](const Batch& batch) {
    const auto part = [&](const Tensor& all) { return all.chunk(2)[static_cast<std::size_t>(group.rank())]; };
    return mean_loss(ddp(part(batch.ids)), part(batch.labels));
  });
  expect_equal(parallel::parameters_of(*net), trained_alone());
}

TEST_F(GpuRanks, TensorParallelTrainsAsOneProcess) {
  const auto group = ranks();
  auto net = on_gpu();
  parallelize_module(net, group,
                     {{"*.token", RowwiseParallel()},
                      {"*.qkv", ColwiseParallel()},
                      {"*.out", RowwiseParallel()},
                      {"*.up", ColwiseParallel()},
                      {"*.down", RowwiseParallel()},
                      {"*.head", ColwiseParallel()}});
  train(net, [&](const Batch& batch) {
    return vocabulary_parallel_cross_entropy(net(batch.ids), batch.labels, group).mean();
  });
  auto whole = parallel::parameters_of(*net);
  for (auto& [name, parameter] : whole) parameter = full_tensor(parameter);
  expect_equal(whole, trained_alone());
}

TEST_F(GpuRanks, RingAttentionIsAttentionOverTheWholeSequence) {
  const auto group = ranks();
  const auto part = [&](const Tensor& x) {
    return x.detach().chunk(2, 2)[static_cast<std::size_t>(group.rank())].clone();
  };
  at::manual_seed(1);
  std::vector<Tensor> whole, mine;
  for (int i = 0; i < 3; ++i) {
    whole.push_back(at::randn({2, 3, 12, 5}, at::kDouble).cuda().requires_grad_());
    mine.push_back(part(whole.back()).requires_grad_());
  }
  const auto expected = at::scaled_dot_product_attention(whole[0], whole[1], whole[2], {}, 0, /*is_causal=*/true);
  expected.pow(2).sum().backward();
  const auto output = ring_attention(mine[0], mine[1], mine[2], group, {.is_causal = true});
  output.pow(2).sum().backward();
  EXPECT_TRUE(at::allclose(output, part(expected), 1e-10, 1e-12));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(mine[i].grad(), part(whole[i].grad()), 1e-8, 1e-10));
}

TEST_F(GpuRanks, FullyShardSaysThatParametersMustBeInHostMemory) {
  auto net = on_gpu();
  const auto message = message_of<InvalidArgument>([&] { fully_shard(net, ranks()); });
  expect_says(message, "on cuda:0");
  expect_says(message, "in host memory");
}

TEST_F(GpuRanks, WorkersTrainAsOneCpu) {
  at::manual_seed(4);
  const auto data = Dataset::from_tensor_slices(at::randn({52, 6}), at::randint(3, {52}, at::kLong)).batch(8);
  const auto fitted = [&](const Strategy& strategy) {
    const auto scope = strategy.scope();
    set_random_seed(3);
    Sequential model({Dense(16, {.activation = "relu"}), Dense(3)});
    model.compile(
        {.optimizer = Adam({.global_clipnorm = 0.5}), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    model.fit(data, {.epochs = 3, .verbose = 0});
    return unwrap(model.module()).flat(0, at::kFloat).cpu();
  };
  const auto expected = fitted(OneDeviceStrategy("cpu:0"));
  for (const bool shards : {false, true}) {
    const MultiWorkerMirroredStrategy strategy({.shard_optimizer_state = shards});
    EXPECT_EQ(strategy.devices(), std::vector<std::string>{"cuda:0"});
    EXPECT_TRUE(at::allclose(fitted(strategy), expected, 1e-3, 1e-5));
  }
}

}  // namespace
}  // namespace lockstep
