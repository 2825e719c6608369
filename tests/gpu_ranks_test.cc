// `lockstep run -n 2 gpu_ranks_test` runs this test: its ranks are processes, which share a GPU where there is one, and
// have one each where there are more. Fails without a GPU.
#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>
#include <lockstep/ddp.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>

#include "base/expect_says_testing.h"
#include "meshes.h"

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
    const auto* const devices = c10::impl::getDeviceGuardImpl(at::kCUDA);
    devices->setDevice({at::kCUDA, static_cast<c10::DeviceIndex>(job_.rank() % devices->deviceCount())});
  }

  static std::string device() { return c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice().str(); }

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
void train(
    const std::vector<Tensor>& parameters, const Loss& loss, const std::function<void()>& clip = [] {}) {
  torch::optim::Adam adam(parameters, torch::optim::AdamOptions(1e-3));
  for (int step = 0; step < kSteps; ++step) {
    adam.zero_grad();
    loss(batch_of(step)).backward();
    clip();
    adam.step();
  }
}

Tensor mean_loss(const Tensor& logits, const Tensor& labels) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), labels.flatten());
}

// Returns the parameters that this process trains alone, on all examples.
parallel::Parameters trained_alone(double max_norm = std::numeric_limits<double>::infinity()) {
  auto net = on_gpu();
  train(
      net->parameters(), [&](const Batch& batch) { return mean_loss(net(batch.ids), batch.labels); },
      [&] { torch::nn::utils::clip_grad_norm_(net->parameters(), max_norm); });
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
  train(net->parameters(), [&](const Batch& batch) {
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
  train(net->parameters(), [&](const Batch& batch) {
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

TEST_F(GpuRanks, FullyShardTrainsAsOneProcess) {
  const auto group = ranks();
  constexpr double kMaxNorm = 0.5;
  const auto expected = trained_alone(kMaxNorm);
  for (const bool offload : {false, true}) {
    SCOPED_TRACE(offload ? "cpu_offload" : "on the GPU");
    auto net = on_gpu();
    auto sharded = fully_shard(net, group, {.units = {"1", "2"}, .prefetch = true, .cpu_offload = offload});
    train(
        sharded.parameters(),
        [&](const Batch& batch) {
          const auto part = [&](const Tensor& all) { return all.chunk(2)[static_cast<std::size_t>(group.rank())]; };
          return mean_loss(sharded(part(batch.ids)), part(batch.labels));
        },
        [&] { sharded.clip_grad_norm(kMaxNorm); });
    for (const auto& shard : sharded.parameters()) {
      EXPECT_EQ(shard.is_cpu(), offload);
      EXPECT_EQ(shard.grad().is_cpu(), offload);
    }
    const auto whole = sharded.gather();
    for (const auto& [name, value] : whole) {
      EXPECT_TRUE(value.is_cpu());
      EXPECT_LT((value - expected.at(name).cpu()).abs().max().item<double>(), kTolerance) << name;
    }
    EXPECT_EQ(whole.empty(), group.rank() != 0);
    const auto initial = parallel::parameters_of(*on_gpu());
    sharded.load(initial);
    for (const auto& [name, value] : sharded.gather()) EXPECT_TRUE(at::equal(value, initial.at(name).cpu())) << name;
  }
}

TEST_F(GpuRanks, FullyShardNamesParametersOnTwoDevices) {
  auto net = on_gpu();
  net->named_parameters()["3.head.bias"].set_data(at::zeros({48}, at::kDouble));
  const auto message = message_of<InvalidArgument>([&] { fully_shard(net, ranks()); });
  expect_says(message, "3.head.bias is on cpu");
  expect_says(message, "on cuda:0");
}

TEST_F(GpuRanks, APipelineTrainsAsOneProcess) {
  const auto group = ranks();
  std::vector<PipelineStage> stages;
  for (int stage = 0; stage < 2; ++stage) {
    stages.emplace_back([stage] {
      auto net = parallel::make_transformer({}, stage, 2);
      net->to(at::kCUDA);
      return net;
    });
  }
  Pipeline pipeline(stages, group, {.schedule = schedules::zero_bubble, .microbatches = 4});
  torch::optim::Adam adam(pipeline.parameters(), torch::optim::AdamOptions(1e-3));
  for (int step = 0; step < kSteps; ++step) {
    adam.zero_grad();
    const auto batch = batch_of(step);
    pipeline.step(batch.ids, batch.labels, mean_loss);
    adam.step();
  }
  const auto expected = trained_alone();
  for (const auto& [stage, module] : pipeline.modules()) {
    for (const auto& each : module->named_parameters())
      EXPECT_LT((each.value() - expected.at(each.key())).abs().max().item<double>(), kTolerance) << each.key();
  }
  EXPECT_TRUE(pipeline.forward(batch_of(0).ids).is_cuda());
}

// Parameters and inputs of 16 bits, gradients that are summed in 32.
TEST_F(GpuRanks, FullyShardComputesIn16Bits) {
  const auto group = ranks();
  auto net = on_gpu();
  net->to(at::kFloat);
  auto sharded =
      fully_shard(net, group, {.units = {"1", "2"}, .param_dtype = DType::bfloat16, .reduce_dtype = DType::float32});
  std::vector<double> losses;
  train(sharded.parameters(), [&](const Batch&) {
    const auto batch = batch_of(0);
    const auto output = sharded(batch.ids);
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    const auto loss = mean_loss(output.to(at::kFloat), batch.labels);
    losses.push_back(loss.item<double>());
    return loss;
  });
  EXPECT_LT(losses.back(), 0.9 * losses.front());
  EXPECT_EQ(sharded.parameters()[0].scalar_type(), at::kFloat);
}

TEST_F(GpuRanks, FitsOnMeshesAsOneCpu) {
  const auto data = make_sequences();
  const auto fitted = [&](const Strategy& strategy, bool of_layers) {
    const auto scope = strategy.scope();
    auto model = make_transformer_model(Adam({.global_clipnorm = 0.5}), of_layers);
    auto history = model.fit(data, {.epochs = 3, .verbose = 0, .validation_data = data}).history;
    return Trained{whole_weights(model), history, model.predict(data)};
  };
  for (const char* axis : {"data", "shard", "tensor", "pipeline"}) {
    SCOPED_TRACE(axis);
    const bool of_layers = std::string(axis) == "pipeline";
    ModelParallelOptions options;
    if (std::string(axis) == "tensor") options.plan = transformer_plan();
    if (std::string(axis) == "shard") options.fully_shard.units = {"1", "2"};
    options.device = device();
    const auto expected = fitted(OneDeviceStrategy("cpu:0"), of_layers);
    const auto trained = fitted(ModelParallelStrategy(DeviceMesh({{axis, 2}}), options), of_layers);
    for (const auto& [name, value] : trained.weights)
      EXPECT_LT((value.cpu() - expected.weights.at(name)).abs().max().item<double>(), kTolerance) << name;
    for (const auto& [name, values] : trained.history) {
      for (std::size_t i = 0; i < values.size(); ++i)
        EXPECT_NEAR(values[i], expected.history.at(name)[i], kTolerance) << name;
    }
    EXPECT_LT((trained.predicted.cpu() - expected.predicted).abs().max().item<double>(), kTolerance);
  }
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
    EXPECT_EQ(strategy.devices(), std::vector<std::string>{device()});
    EXPECT_TRUE(at::allclose(fitted(strategy), expected, 1e-3, 1e-5));
  }
}

}  // namespace
}  // namespace lockstep
