// Dense layers and softmax cross-entropy on floats (ours) against LibTorch's operators in double precision.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <filesystem>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "kernels/each_target_testing.h"
#include "lockstep/ops/ops.h"
#include "ops/fast.h"

namespace lockstep::ops {
namespace {

Tensor dense_leaf(const Tensor& x, at::ScalarType type) {
  return x.defined() ? x.detach().to(type, false, true).requires_grad_() : Tensor();
}

void expect_near(const Tensor& actual, const Tensor& expected) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  ASSERT_TRUE(at::allclose(actual.to(at::kDouble), expected, 1e-4, 1e-4))
      << (actual.to(at::kDouble) - expected).abs().max().item<double>();
}

TEST(Dense, ForwardAndBackwardAreLibTorchs) {
  kernels::for_each_target([] {
    at::manual_seed(1);
    std::mt19937 generator(1);
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(generator() % n); };
    for (int i = 0; i < 60; ++i) {
      const auto inputs = 1 + below(300), units = 1 + below(100);
      auto x = at::randn({1 + below(70), inputs}, at::kDouble);
      if (below(3) == 0) x = at::randn({1 + below(5), 1 + below(9), inputs}, at::kDouble);
      if (below(4) == 0) x = at::randn({inputs, 1 + below(30)}, at::kDouble).t();
      const auto weight = at::randn({units, inputs}, at::kDouble);
      const auto bias = below(3) == 0 ? Tensor() : at::randn({units}, at::kDouble);
      const bool relu = below(2) == 0;
      SCOPED_TRACE(testing::Message() << "case " << i << " " << x.sizes() << " units " << units << " relu " << relu);
      const auto run = [&](at::ScalarType type) {
        const auto own_x = dense_leaf(x, type), own_weight = dense_leaf(weight, type),
                   own_bias = dense_leaf(bias, type);
        const auto optional_bias = bias.defined() ? std::optional<Tensor>(own_bias) : std::nullopt;
        const auto y =
            relu ? ops::linear_relu(own_x, own_weight, own_bias) : at::linear(own_x, own_weight, optional_bias);
        y.backward(at::linspace(-1, 1, y.numel(), y.options()).reshape(y.sizes()));
        return std::vector<Tensor>{y, own_x.grad(), own_weight.grad(),
                                   bias.defined() ? own_bias.grad() : at::zeros({1})};
      };
      const auto actual = run(at::kFloat), expected = run(at::kDouble);
      for (std::size_t k = 0; k < actual.size(); ++k) expect_near(actual[k], expected[k].to(at::kDouble));
    }
  });
}

TEST(Dense, ManyThreadsComputeTheSameBits) {
  const auto x = at::randn({40, 300}), weight = at::randn({200, 300});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = at::linear(x, weight);
  at::set_num_threads(4);
  const auto four = at::linear(x, weight);
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(one, four));
}

TEST(Dense, ARowDoesNotDependOnTheOthers) {
  const auto x = at::randn({64, 300}), weight = at::randn({50, 300});
  EXPECT_TRUE(at::equal(at::linear(x, weight).slice(0, 0, 20), at::linear(x.slice(0, 0, 20), weight)));
}

TEST(Dense, ResultsCanBeChangedInPlace) {
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{8, 16}, {2, 4, 16}}) {
    const auto x = at::randn(sizes), weight = at::randn({12, 16}).requires_grad_();
    auto shifted = at::linear(x, weight);
    shifted += 1;
    EXPECT_TRUE(at::allclose(shifted, at::matmul(x, weight.t()) + 1, 1e-4, 1e-4));
    auto y = at::linear(x, weight);
    y.relu_();
    y.sum().backward();
    const auto expected =
        at::matmul((at::matmul(x, weight.detach().t()) > 0).to(at::kFloat).reshape({8, 12}).t(), x.reshape({8, 16}));
    EXPECT_TRUE(at::allclose(weight.grad(), expected, 1e-4, 1e-4));
  }
}

TEST(Dense, LazilyNegatedTensorsAreNegative) {
  const auto x = at::randn({8, 16}), weight = at::randn({12, 16});
  EXPECT_TRUE(at::allclose(at::linear(at::_neg_view(x), weight), -at::linear(x, weight)));
}

// OpenMP starts a thread for each one that it is to use beside the caller, in the first parallel region of a caller.
TEST(Dense, UsesTheThreadsOfItsReplica) {
  // By name: threads of other tests that have ended may go from the list meanwhile.
  const auto threads = [] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) names.insert(entry.path());
    return names;
  };
  const int before = at::get_num_threads();
  std::jthread([&] {
    at::set_num_threads(3);
    const auto x = at::ones({64, 300}), weight = at::ones({100, 300});  // too small for LibTorch to fill in parallel
    const auto before_it = threads();
    at::linear(x, weight);
    auto started = threads();
    for (const auto& name : before_it) started.erase(name);
    EXPECT_EQ(started.size(), 2U) << "the operator is not compiled for LibTorch's threads";
  }).join();
  at::set_num_threads(before);
}

TEST(Dense, HooksRunOnceWhereGradientsHaveAGraph) {
  const auto logits = at::randn({8, 10}).requires_grad_();
  int calls = 0;
  logits.register_hook([&](const Tensor& gradient) {
    ++calls;
    return gradient;
  });
  torch::autograd::grad({ops::softmax_cross_entropy(logits, at::zeros({8}, at::kLong)).sum()}, {logits}, {}, true,
                        true);
  EXPECT_EQ(calls, 1);
}

TEST(Dense, GradientsCanBeDifferentiatedAgain) {
  const auto x = at::randn({8, 20}), weight = at::randn({12, 20}), bias = at::randn({12});
  for (const bool relu : {false, true}) {
    const auto second = [&](at::ScalarType type) {
      const auto own_x = dense_leaf(x, type), own_weight = dense_leaf(weight, type), own_bias = dense_leaf(bias, type);
      const auto y = relu ? ops::linear_relu(own_x, own_weight, own_bias) : at::linear(own_x, own_weight, own_bias);
      const auto first = torch::autograd::grad({y.pow(3).sum()}, {own_x, own_weight, own_bias}, {}, true, true);
      const auto sum = first[0].pow(2).sum() + first[1].pow(2).sum() + first[2].pow(2).sum();
      return torch::autograd::grad({sum}, {own_weight})[0].to(at::kDouble);
    };
    const auto expected = second(at::kDouble);
    EXPECT_TRUE(at::allclose(second(at::kFloat), expected, 1e-3, 1e-3 * expected.abs().max().item<double>()));
  }
}

TEST(Dense, RefusesWhatLibTorchRefuses) {
  EXPECT_THROW(at::linear(at::rand({8, 20}), at::rand({12, 21})), c10::Error);
  EXPECT_THROW(ops::linear_relu(at::rand({8, 20}), at::rand({12, 20}), at::rand({13})), c10::Error);
}

TEST(SoftmaxCrossEntropy, ForwardAndBackwardAreLibTorchs) {
  kernels::for_each_target([] {
    at::manual_seed(1);
    for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{1, 1}, {5, 3}, {64, 10}, {7, 33}, {3, 4, 17}}) {
      const auto logits = at::randn(sizes, at::kDouble) * 20;
      const auto labels = at::randint(sizes.back(), at::IntArrayRef(sizes).slice(0, sizes.size() - 1), at::kLong);
      const auto run = [&](at::ScalarType type) {
        const auto own = dense_leaf(logits, type);
        const auto loss = ops::softmax_cross_entropy(own, labels);
        loss.backward(at::linspace(-1, 2, loss.numel(), loss.options()).reshape(loss.sizes()));
        return std::pair(loss, own.grad());
      };
      const auto actual = run(at::kFloat), expected = run(at::kDouble);
      expect_near(actual.first, expected.first);
      expect_near(actual.second, expected.second);
    }
  });
}

TEST(SoftmaxCrossEntropy, ExtremeLogits) {
  const auto logits = at::tensor({1e4F, -1e4F, 0.0F, -INFINITY, 0.0F, NAN}).reshape({3, 2});
  const auto loss = ops::softmax_cross_entropy(logits, at::tensor({1, 1, 0}, at::kLong));
  EXPECT_EQ(loss[0].item<float>(), 2e4F);
  EXPECT_EQ(loss[1].item<float>(), INFINITY);
  EXPECT_TRUE(std::isnan(loss[2].item<float>()));
  EXPECT_THROW(ops::softmax_cross_entropy(logits, at::tensor({1, 1, 2}, at::kLong)), c10::Error);
}

// Backward does not need the input of a layer with a frozen weight: it may change in place, and is not kept.
TEST(Dense, AFrozenWeightKeepsNoInput) {
  const auto weight = at::rand({16, 16}), bias = at::rand({16}).requires_grad_();
  auto x = at::rand({8, 16}).requires_grad_();
  auto hidden = x * 2;
  const auto y = at::linear(hidden, weight, bias);
  hidden.detach().mul_(0);  // bumps the version of what linear got
  hidden.unsafeGetTensorImpl()->bump_version();
  y.sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), at::mm(at::ones({8, 16}), weight) * 2));
  EXPECT_TRUE(at::allclose(bias.grad(), at::full({16}, 8.0)));
}

TEST(Dense, GradientsThroughAFrozenWeightOrInputAreLibTorchs) {
  for (const bool frozen_weight : {false, true}) {
    const auto x = at::rand({2, 5, 16}), w = at::rand({16, 16});
    const auto gradient_of = [&](const auto& linear) {
      const auto input = x.clone().requires_grad_(frozen_weight), weight = w.clone().requires_grad_(!frozen_weight);
      linear(input, weight).square().sum().backward();
      return frozen_weight ? input.grad() : weight.grad();
    };
    const auto ours = gradient_of([](const Tensor& a, const Tensor& b) { return at::linear(a, b); });
    const auto theirs = gradient_of([](const Tensor& a, const Tensor& b) { return at::matmul(a, b.t()); });
    EXPECT_TRUE(at::allclose(ours, theirs, 1e-4));
  }
}

// The first gradient of a weight in backward is written to the offered memory; later ones are added.
TEST(Dense, GradientsAreWrittenToOfferedMemory) {
  const auto x = at::rand({8, 16}), w = at::rand({16, 16});
  for (const int uses : {1, 2}) {
    const auto gradient_of = [&](const Tensor& weight) {
      auto y = at::linear(x, weight);
      if (uses == 2) y = at::linear(y, weight) + at::matmul(x, weight.t());
      y.square().sum().backward();
      return weight.grad();
    };
    const auto expected = gradient_of(w.clone().requires_grad_());
    const auto weight = w.clone().requires_grad_();
    const auto memory = at::full({16, 16}, 7.0);
    ops::offer_gradient_memory(weight.const_data_ptr(), memory.view({16, 16}));
    const auto first = gradient_of(weight);
    EXPECT_TRUE(at::allclose(first, expected, 1e-4));
    EXPECT_NE(memory[0][0].item<float>(), 7) << "nothing was written to it";
    if (uses == 1) {
      EXPECT_EQ(first.const_data_ptr(), memory.const_data_ptr());
    }
    weight.mutable_grad().reset();
    EXPECT_TRUE(at::allclose(gradient_of(weight), expected, 1e-4));
    EXPECT_NE(weight.grad().const_data_ptr(), memory.const_data_ptr()) << "it was offered once";

    const auto other = w.clone().requires_grad_();
    ops::offer_gradient_memory(other.const_data_ptr(), at::empty({16, 15}));
    EXPECT_TRUE(at::allclose(gradient_of(other), expected, 1e-4)) << "memory of another shape";
    ops::clear_gradient_memory();
  }
}

}  // namespace
}  // namespace lockstep::ops
