#include "lockstep/parallel/recompute.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>

#include <functional>
#include <set>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "lockstep/parallel/fully_shard.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

struct RecomputedNetImpl : torch::nn::Module {
  explicit RecomputedNetImpl(bool again) : again_(again) {
    for (int i = 0; i < 3; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<BlockImpl>(TransformerOptions())));
    dropout = register_module("dropout", torch::nn::Dropout(0.3));
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) x = again_ ? recompute(block, x) : block->forward(x);
    return again_ ? recompute(dropout, x) : dropout(x);
  }
  const bool again_;
  std::vector<std::shared_ptr<BlockImpl>> blocks;
  torch::nn::Dropout dropout = nullptr;
};
TORCH_MODULE(RecomputedNet);

struct Result {
  at::Tensor y, of_x;
  std::vector<at::Tensor> of_parameters;
};

Result run(bool again, bool x_has_gradient) {
  torch::manual_seed(4);
  RecomputedNet net(again);
  auto x = torch::randn({2, 12, 24}, at::kDouble).requires_grad_(x_has_gradient);
  const auto y = net(x);
  const auto after = torch::rand({3});  // numbers that follow are those that would follow without
  (y.pow(2).sum() * after.sum()).backward();
  Result result{y, x.grad(), {}};
  for (const auto& parameter : net->parameters()) result.of_parameters.push_back(parameter.grad());
  return result;
}

TEST(Recompute, HasTheSameBits) {
  for (const bool x_has_gradient : {false, true}) {
    const auto kept = run(false, x_has_gradient), again = run(true, x_has_gradient);
    EXPECT_TRUE(again.y.equal(kept.y));
    EXPECT_TRUE(!x_has_gradient || again.of_x.equal(kept.of_x));
    for (std::size_t i = 0; i < kept.of_parameters.size(); ++i)
      EXPECT_TRUE(again.of_parameters[i].equal(kept.of_parameters[i])) << i;
  }
}

// How many nodes of the graph a forward keeps.
std::size_t kept_nodes(bool again) {
  RecomputedNet net(again);
  auto x = torch::randn({2, 12, 24}, at::kDouble).requires_grad_();
  const auto y = net(x);
  std::size_t nodes = 0;
  std::vector<std::shared_ptr<torch::autograd::Node>> left{y.grad_fn()};
  std::set<torch::autograd::Node*> seen;
  while (!left.empty()) {
    const auto node = left.back();
    left.pop_back();
    if (node == nullptr || !seen.insert(node.get()).second) continue;
    ++nodes;
    for (const auto& edge : node->next_edges()) left.push_back(edge.function);
  }
  return nodes;
}

TEST(Recompute, KeepsNoGraphOfTheModule) { EXPECT_LT(kept_nodes(true) * 3, kept_nodes(false)); }

TEST(Recompute, GoesWithShardedParameters) {
  torch::manual_seed(4);
  auto whole = RecomputedNet(false);
  whole->eval();
  const auto x = torch::randn({2, 12, 24}, at::kDouble);
  whole(x).pow(2).sum().backward();
  std::mutex making;
  collective::on_ranks(2, [&](const Group& group) {
    auto net = [&] {
      const std::lock_guard lock(making);
      torch::manual_seed(4);
      return RecomputedNet(true);
    }();
    net->eval();
    auto sharded = fully_shard(net, {group, 30}, {.units = {"block*"}});
    sharded(x).pow(2).sum().backward();
    double squares = 0, expected = 0;
    for (const auto& shard : sharded.parameters()) squares += shard.grad().pow(2).sum().item<double>();
    for (const auto& parameter : whole->parameters()) expected += parameter.grad().pow(2).sum().item<double>();
    Communicator(group).sum({&squares, 1});
    EXPECT_NEAR(squares, expected, 1e-9 * expected);
  });
}

struct Scaled : torch::nn::Module {
  explicit Scaled(std::function<void(at::Tensor&)> change) : change_(std::move(change)) {
    weight = register_parameter("weight", at::ones({3}, at::kDouble));
  }
  at::Tensor forward(at::Tensor x) {
    change_(x);
    return weight * x;
  }
  at::Tensor weight;
  const std::function<void(at::Tensor&)> change_;
};

// The second forward would begin with the values that the first one left.
TEST(Recompute, RefusesAModuleThatChangesItsInput) {
  const auto x = at::arange(1, 4, at::kDouble);
  for (const std::function<void(at::Tensor&)>& change :
       {std::function([](at::Tensor& of) { of.mul_(2); }), std::function([](at::Tensor& of) { of[0] = 5; }),
        std::function([](at::Tensor& of) {
          of.view({3, 1}).relu_();
        })}) {
    auto module = std::make_shared<Scaled>(change);
    expect_says(message_of<InvalidArgument>([&] { recompute(module, x.clone()); }), "changes its input in place");
  }
  auto module = std::make_shared<Scaled>([](at::Tensor& of) { of = of.clone().mul_(2); });
  recompute(module, x).sum().backward();
  EXPECT_TRUE(at::equal(module->weight.grad(), 2 * x));
}

TEST(Recompute, RefusesParametersThatChangedSinceForward) {
  auto module = std::make_shared<Scaled>([](at::Tensor&) {});
  const auto x = at::ones({3}, at::kDouble).requires_grad_();
  const auto y = recompute(module, x);
  {
    const at::NoGradGuard no_gradient;
    module->weight.mul_(3);
  }
  expect_says(message_of<InvalidArgument>([&] { y.sum().backward(); }), "parameters have changed since its forward");
}

// A layer under two names, called twice.
struct SharedLayerImpl : torch::nn::Module {
  SharedLayerImpl() {
    first = register_module("first", torch::nn::Linear(4, 4));
    second = register_module("second", first);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  torch::nn::Linear first = nullptr, second = nullptr;
};
TORCH_MODULE(SharedLayer);

TEST(Recompute, CountsASharedLayerOnce) {
  SharedLayer net;
  const auto x = at::sin(at::arange(12, at::kDouble)).view({3, 4});
  net(x).pow(2).sum().backward();
  const auto expected = net->first->weight.grad().clone();
  net->zero_grad();
  recompute(net, x).pow(2).sum().backward();
  EXPECT_TRUE(at::allclose(net->first->weight.grad(), expected));
}

// Such a module has frozen layers, or layers that are not used.
TEST(Recompute, AModuleMayUseNoneOfItsParameters) {
  struct Passes : Scaled {
    Passes() : Scaled([](at::Tensor&) {}) {}
    at::Tensor forward(const at::Tensor& x) { return x * 2; }
  };
  auto module = std::make_shared<Passes>();
  const auto used = at::ones({3}, at::kDouble).requires_grad_();
  (recompute(module, at::ones({3}, at::kDouble)) * used).sum().backward();
  EXPECT_TRUE(at::equal(used.grad(), at::full({3}, 2, at::kDouble)));
  EXPECT_FALSE(module->weight.grad().defined());
}

TEST(Recompute, RefusesParametersOfOtherModules) {
  const auto other = at::ones({3}, at::kDouble).requires_grad_();
  auto module = std::make_shared<Scaled>([&](at::Tensor& x) { x = x * other; });
  const auto y = recompute(module, at::ones({3}, at::kDouble));
  expect_says(message_of<InvalidArgument>([&] { y.sum().backward(); }),
              "uses a tensor of shape [3] that requires gradients and is neither its input nor one of its parameters");
}

// Programs do so that keep a loss of training while the module predicts.
TEST(Recompute, TheSecondForwardHasTheModeOfTheFirst) {
  torch::nn::Sequential module(torch::nn::Linear(4, 4), torch::nn::Dropout(0.5));
  const auto x = at::ones({3, 4});
  const auto gradient = [&](bool recomputes) {
    module->zero_grad();
    module->train();
    torch::manual_seed(1);
    const auto y = recomputes ? recompute(module, x) : module->forward(x);
    module->eval();
    y.sum().backward();
    EXPECT_FALSE(module[1]->is_training());
    return module->parameters()[0].grad().clone();
  };
  EXPECT_TRUE(at::equal(gradient(true), gradient(false)));
}

TEST(Recompute, RunningStatisticsAreUpdatedOnce) {
  const auto statistics = [](bool recomputes) {
    torch::nn::BatchNorm1d norm(3);
    for (int step = 0; step < 2; ++step) {
      const auto x = at::sin(at::arange(12).view({4, 3}) * (0.7 + step));
      const auto first = recomputes ? recompute(norm, x) : norm(x),
                 second = recomputes ? recompute(norm, x * 2) : norm(x * 2);
      (first * second).sum().backward();
    }
    return norm->buffers();
  };
  const auto once = statistics(false), again = statistics(true);
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(at::equal(again[i], once[i])) << again[i] << once[i];
}

// A forward that reads buffers and writes them: a running scale, and views of them that are no memory of their own.
struct RunningScale : torch::nn::Module {
  RunningScale() {
    weight = register_parameter("weight", at::arange(1, 4, at::kDouble));
    scale = register_buffer("scale", at::ones({3}, at::kDouble));
    mask = register_buffer("mask", at::ones({1}, at::kDouble).expand({2, 3}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = x * weight / scale.clone() * mask;
    scale.copy_(scale * 0.9 + x.detach().abs().mean(0) * 0.1);
    return y;
  }
  at::Tensor weight, scale, mask;
};

TEST(Recompute, TheSecondForwardHasTheBuffersOfTheFirst) {
  const auto train = [](bool recomputes) {
    auto module = std::make_shared<RunningScale>();
    for (int step = 0; step < 2; ++step) {
      const auto x = at::arange(6, at::kDouble).view({2, 3}) + step;
      const auto first = recomputes ? recompute(module, x) : module->forward(x);
      const auto second = recomputes ? recompute(module, x * 2) : module->forward(x * 2);
      (first * second).sum().backward();
    }
    return std::pair(module->weight.grad(), module->scale);
  };
  const auto [once, scale] = train(false);
  const auto [again, same_scale] = train(true);
  EXPECT_TRUE(at::equal(again, once)) << again << once;
  EXPECT_TRUE(at::equal(same_scale, scale));
}

TEST(Recompute, HooksOfGradientsAreCalledOnce) {
  auto module = std::make_shared<Scaled>([](at::Tensor&) {});
  module->weight.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
  const auto x = at::arange(1, 4, at::kDouble);
  recompute(module, x).sum().backward();
  EXPECT_TRUE(at::equal(module->weight.grad(), 2 * x));
  recompute(module, x).sum().backward();  // the hook is still there
  EXPECT_TRUE(at::equal(module->weight.grad(), 4 * x));
}

TEST(Recompute, CannotBeDifferentiatedTwice) {
  RecomputedNet net(true);
  auto x = torch::randn({1, 12, 24}, at::kDouble).requires_grad_();
  expect_says(message_of<InvalidArgument>([&] { torch::autograd::grad({net(x).sum()}, {x}, {}, true, true); }),
              "cannot be differentiated twice");
}

}  // namespace
}  // namespace lockstep::parallel
