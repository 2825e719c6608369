// Layers whose output ranks share, such as keys and values of multi-query attention, against one process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/parallel/tensor_parallel.h"

namespace lockstep::parallel {
namespace {

// Values that need no generator, since ranks are threads.
at::Tensor ripples(at::IntArrayRef sizes, double phase) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kDouble) * 1.7 + phase).view(sizes);
}

// Attention of many queries to keys and values that the heads share.
struct MultiQueryImpl : torch::nn::Module {
  MultiQueryImpl() {
    for (auto* const each : {&q, &out}) *each = torch::nn::Linear(4, 4);
    for (auto* const each : {&k, &v}) *each = torch::nn::Linear(4, 2);
    const std::vector<std::pair<const char*, torch::nn::Linear*>> all{{"q", &q}, {"k", &k}, {"v", &v}, {"out", &out}};
    double phase = 0;
    for (const auto& [name, layer] : all) {
      register_module(name, *layer)->to(at::kDouble);
      const at::NoGradGuard no_gradient;
      for (const auto& parameter : (*layer)->parameters()) parameter.copy_(ripples(parameter.sizes(), phase += 0.3));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto queries = q(x).unflatten(-1, {-1, 2}).transpose(1, 2);
    const auto attended = at::scaled_dot_product_attention(queries, k(x).unsqueeze(1).expand_as(queries),
                                                           v(x).unsqueeze(1).expand_as(queries));
    return out(attended.transpose(1, 2).flatten(2));
  }
  torch::nn::Linear q = nullptr, k = nullptr, v = nullptr, out = nullptr;
};
TORCH_MODULE(MultiQuery);

TEST(ReplicateParallel, TrainsSharedKeysAndValuesAsOneProcess) {
  const auto x = ripples({2, 5, 4}, 0.4);
  MultiQuery whole;
  const auto input = x.clone().requires_grad_();
  whole(input).pow(2).sum().backward();
  const ParallelPlan plan{{"q", ColwiseParallel()}, {"out", RowwiseParallel()}};
  auto complete = plan;
  complete.emplace_back("k", ReplicateParallel());
  complete.emplace_back("v", ReplicateParallel());
  collective::on_ranks(2, [&](const Group& group) {
    MultiQuery net;
    parallelize_module(net, {group, 30}, complete);
    const auto here = x.clone().requires_grad_();
    net(here).pow(2).sum().backward();
    EXPECT_TRUE(at::allclose(here.grad(), input.grad()));
    EXPECT_TRUE(at::allclose(net->k->weight.grad(), whole->k->weight.grad()));
    EXPECT_TRUE(at::allclose(net->v->weight.grad(), whole->v->weight.grad()));
    EXPECT_TRUE(at::allclose(net->v->bias.grad(), whole->v->bias.grad()));
  });
  collective::on_ranks(2, [&](const Group& group) {
    MultiQuery net;
    parallelize_module(net, {group, 30}, plan);
    for (const auto& parameter : net->parameters()) parameter.register_hook([](const at::Tensor&) {});  // of a user
    const auto y = net(x).pow(2).sum();
    expect_says(message_of<Error>([&] { y.backward(); }), "which all ranks have whole, differs between ranks");
  });
}

// With a linear loss all ranks have the same gradient of the bias, though their parts of the sequence differ.
TEST(SequenceParallel, MayHaveALinearLoss) {
  const auto x = ripples({2, 6, 4}, 0.4);
  torch::nn::Sequential whole{torch::nn::Linear(4, 4)};
  whole->to(at::kDouble);
  whole->forward(x).sum().backward();
  collective::on_ranks(2, [&](const Group& group) {
    torch::nn::Sequential net{torch::nn::Linear(4, 4)};
    net->to(at::kDouble);
    parallelize_module(*net, {group, 30}, {{"0", SequenceParallel()}});
    net->forward(x.chunk(2, 1)[static_cast<std::size_t>(group.rank())]).sum().backward();
    for (std::size_t i = 0; i < 2; ++i)
      EXPECT_TRUE(at::allclose(net->parameters()[i].grad(), whole->parameters()[i].grad()));
  });
}

// Each rank has the whole: summed over the ranks, gradients would be twice as large.
TEST(ReplicateParallel, WholeActivationsHaveNoParts) {
  const auto x = ripples({2, 5, 4}, 0.4);
  for (const ParallelStyle style : {ParallelStyle(ReplicateParallel()), ParallelStyle(SequenceParallel())}) {
    collective::on_ranks(2, [&](const Group& group) {
      MultiQuery net;
      parallelize_module(net, {group, 30}, {{"q", style}});
      const auto y = net(x).pow(2).sum();
      expect_says(message_of([&] { y.backward(); }), "is the same on all 2 ranks");
    });
  }
}

}  // namespace
}  // namespace lockstep::parallel
