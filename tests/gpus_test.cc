// Loops on several simulated GPUs, a thread each: results of one CPU, and no tensor goes through host memory.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/ddp.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "collective/on_ranks_testing.h"
#include "tests/simulated_gpu/cuda_runtime.h"
#include "tests/simulated_gpu/nccl.h"

namespace lockstep {
namespace {

constexpr int kSteps = 12;
constexpr double kTolerance = 1e-9;

struct Batch {
  Tensor x, y;
};

// Batches of 7 of 4 features; the ranks' parts are ragged, and one may be empty.
std::vector<Batch> batches_on(at::Device device, int part, int parts) {
  std::vector<Batch> batches;
  for (int step = 0; step < kSteps; ++step) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step));
    const auto x = at::randn({7, 4}, generator, at::kDouble);
    const auto y = x.sum(1, true).sin();
    const auto mine = at::arange(part, 7, parts);
    batches.push_back({x.index_select(0, mine).to(device), y.index_select(0, mine).to(device)});
  }
  return batches;
}

// `partly`: the second layer is left out in every other step.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (auto& layer : layers) {
      layer->to(at::kDouble);
      const at::NoGradGuard no_grad;
      auto generator = at::detail::createCPUGenerator(5);
      for (auto& parameter : layer->parameters()) parameter.copy_(at::randn(parameter.sizes(), generator, at::kDouble));
    }
    register_module("first", layers[0]);
    register_module("second", layers[1]);
    register_module("last", layers[2]);
  }
  Tensor forward(const Tensor& x, bool with_second) {
    auto hidden = at::tanh(layers[0]->forward(x));
    if (with_second) hidden = hidden + at::tanh(layers[1]->forward(hidden));
    return layers[2]->forward(hidden);
  }
  std::array<torch::nn::Linear, 3> layers{torch::nn::Linear(4, 8), torch::nn::Linear(8, 8), torch::nn::Linear(8, 1)};
};
TORCH_MODULE(Net);

template <class Forward>
void train(Net& net, const std::vector<Batch>& batches, const Forward& forward) {
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(1e-2));
  for (std::size_t step = 0; step < batches.size(); ++step) {
    adam.zero_grad();
    const auto& [x, y] = batches[step];
    (forward(x, step) - y).square().mean().backward();
    adam.step();
  }
}

Tensor values_of(const Net& net) {
  std::vector<Tensor> all;
  for (const auto& parameter : net->parameters()) all.push_back(parameter.detach().cpu().flatten());
  return at::cat(all);
}

class Gpus : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { simulated_gpu_delay(50); }
  void TearDown() override { simulated_gpu_delay(0); }

  // Calls `body` for each rank, in a thread whose current GPU has the rank's number.
  static void on_gpus(const std::function<void(const Communicator&, at::Device)>& body) {
    collective::on_ranks(GetParam(), [&](const Group& group) {
      const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(group.rank()));
      const c10::DeviceGuard guard(device);
      body(Communicator(group, 60), device);
    });
  }
};

TEST_P(Gpus, DistributedDataParallelTrainsAsOneCpuAndCopiesNothingToTheHost) {
  for (const bool leaves_out : {false, true}) {
    const auto with_second = [&](std::size_t step) { return !leaves_out || step % 2 == 0; };
    Net alone;
    train(alone, batches_on(at::kCPU, 0, 1),
          [&](const Tensor& x, std::size_t step) { return alone->forward(x, with_second(step)); });
    const auto expected = values_of(alone);
    on_gpus([&](const Communicator& ranks, at::Device device) {
      Net net;
      net->to(device);
      const auto batches = batches_on(device, ranks.rank(), ranks.size());
      DistributedDataParallel ddp(net, ranks);
      ranks.group().barrier(ranks.deadline());
      const auto copies = simulated_gpu_copies_to_host();
      const auto calls = simulated_nccl_calls();
      train(net, batches, [&](const Tensor& x, std::size_t step) { return ddp(x, with_second(step)); });
      const auto copied = simulated_gpu_copies_to_host() - copies;
      ranks.group().barrier(ranks.deadline());
      EXPECT_TRUE(copied == 0 || leaves_out) << copied;  // else flags tell which parameters have a gradient anywhere
      EXPECT_GT(simulated_nccl_calls(), calls);
      EXPECT_LT((values_of(net) - expected).abs().max().item<double>(), kTolerance);
    });
  }
}

TEST_P(Gpus, CollectivesOnTensorsCopyNothingToTheHost) {
  on_gpus([&](const Communicator& ranks, at::Device device) {
    const auto& group = ranks.group();
    const auto size = ranks.size();
    const auto soon = [&] { return ranks.deadline(); };
    const auto mine = at::full({2 * size}, ranks.rank() + 1.0, at::TensorOptions(device).dtype(at::kDouble));
    group.barrier(soon());
    const auto copies = simulated_gpu_copies_to_host();
    const auto sum = mine.clone();
    all_reduce(group, sum, ReduceOp::sum, soon());
    const auto of_rank_1 = mine.clone();
    broadcast(group, of_rank_1, 1, soon());
    const auto rows = reduce_scatter(group, mine, ReduceOp::max, soon());
    const auto exchanged = all_to_all(group, mine, soon());
    const auto strided = at::stack({mine, mine}, 1);
    all_reduce(group, strided.select(1, 0), ReduceOp::min, soon());
    group.synchronize(soon());
    EXPECT_EQ(simulated_gpu_copies_to_host(), copies);
    group.barrier(soon());
    EXPECT_TRUE(at::equal(sum.cpu(), at::full({2 * size}, size * (size + 1) / 2.0, at::kDouble)));
    EXPECT_TRUE(at::equal(of_rank_1.cpu(), at::full({2 * size}, 2.0, at::kDouble)));
    EXPECT_TRUE(at::equal(rows.cpu(), at::full({2}, size, at::kDouble)));
    EXPECT_TRUE(at::equal(exchanged.cpu(), at::arange(1, size + 1, at::kDouble).repeat_interleave(2)));
    EXPECT_TRUE(at::equal(strided.select(1, 0).cpu(), at::ones({2 * size}, at::kDouble)));
    const auto gathered = all_gather(group, mine.narrow(0, 0, ranks.rank()), soon());
    EXPECT_TRUE(gathered.is_cuda());
    EXPECT_EQ(gathered.numel(), size * (size - 1) / 2);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Gpus, testing::Values(2, 3));

}  // namespace
}  // namespace lockstep
