// fully_shard in 16 bits against a plain loop that keeps weights of float32 and computes with a copy in bfloat16.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/base/error.h"
#include "lockstep/parallel/fully_shard.h"

namespace lockstep::parallel {
namespace {

constexpr int kPrecisionSteps = 20, kExamples = 12;

torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(7, 20), torch::nn::LayerNorm(torch::nn::LayerNormOptions({20})),
                            torch::nn::Linear(20, 3));
  const at::NoGradGuard no_gradient;
  double phase = 0;
  for (auto& parameter : net->parameters())
    parameter.copy_(at::sin(at::arange(parameter.numel(), at::kFloat) * 1.3 + phase++).view(parameter.sizes()) / 2);
  return net;
}

at::Tensor inputs(int step) { return at::sin(at::arange(kExamples * 7, at::kFloat).view({kExamples, 7}) + step); }

template <class Net>
at::Tensor loss_of(Net& net, const at::Tensor& x) {
  return (net(x.to(at::kBFloat16)).to(at::kFloat) - x.slice(1, 0, 3)).pow(2).mean();
}

// The weights that a loop without ranks trains, which sums the gradients of `parts` parts of each batch in `summed`.
std::vector<at::Tensor> expected(int parts, at::ScalarType summed) {
  auto master = make_net(), copy = make_net();
  copy->to(at::kBFloat16);
  torch::optim::AdamW adamw(master->parameters(), torch::optim::AdamWOptions(1e-2));
  const auto call = [&](const at::Tensor& x) { return copy->forward(x); };
  for (int step = 0; step < kPrecisionSteps; ++step) {
    const auto weights = master->parameters();
    std::vector<at::Tensor> sums(weights.size());
    for (const auto& x : inputs(step).chunk(parts)) {
      {
        const at::NoGradGuard no_gradient;
        for (std::size_t i = 0; i < weights.size(); ++i) copy->parameters()[i].copy_(weights[i]);
      }
      copy->zero_grad();
      loss_of(call, x).backward();
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const auto part = copy->parameters()[i].grad().to(summed) * (1.0 / parts);
        sums[i] = sums[i].defined() ? sums[i] + part : part;
      }
    }
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i].mutable_grad() = sums[i].to(at::kFloat);
    adamw.step();
  }
  return master->parameters();
}

TEST(ShardedPrecision, IsThatOfWeightsOfFloat32AndACopyInBfloat16) {
  for (const bool sums_in_32 : {true, false}) {
    const auto summed = sums_in_32 ? DType::float32 : DType::bfloat16;
    const auto weights = expected(2, sums_in_32 ? at::kFloat : at::kBFloat16);
    collective::on_ranks(2, [&](const Group& group) {
      auto net = make_net();
      auto sharded =
          fully_shard(net, group, {.units = {"0", "2"}, .param_dtype = DType::bfloat16, .reduce_dtype = summed});
      torch::optim::AdamW adamw(sharded.parameters(), torch::optim::AdamWOptions(1e-2));
      for (const auto& shard : sharded.parameters()) EXPECT_EQ(shard.scalar_type(), at::kFloat);
      EXPECT_EQ(net->parameters()[0].scalar_type(), at::kBFloat16);
      for (int step = 0; step < kPrecisionSteps; ++step) {
        adamw.zero_grad();
        loss_of(sharded, inputs(step).chunk(2)[static_cast<std::size_t>(group.rank())]).backward();
        adamw.step();
      }
      const auto values = sharded.gather();
      if (group.rank() != 0) return;
      const auto names = net->named_parameters().keys();
      for (std::size_t i = 0; i < names.size(); ++i) {
        EXPECT_EQ(values.at(names[i]).scalar_type(), at::kFloat);
        EXPECT_LT((values.at(names[i]) - weights[i]).abs().max().item<double>(), sums_in_32 ? 1e-6 : 1e-3) << names[i];
      }
    });
  }
}

TEST(ShardedPrecision, OtherDtypesAreRefused) {
  const auto refused = [](FullyShardOptions options) {
    return message_of<InvalidArgument>([&] { FullyShardedParameters(Communicator(), std::move(options)); });
  };
  expect_says(refused({.param_dtype = DType::int32}),
              "fully_shard: param_dtype is int32; it must be float16, bfloat16 or float32");
  expect_says(refused({.reduce_dtype = DType::float64}), "reduce_dtype is float64");
}

}  // namespace
}  // namespace lockstep::parallel
