// Convolution, ReLU and pooling in one pass against LibTorch's three operators in double precision, for random shapes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <random>

#include "kernels/each_target_testing.h"
#include "lockstep/ops/ops.h"

namespace lockstep::ops {
namespace {

Tensor plain(const Tensor& x, const Tensor& weight, const Tensor& bias, at::IntArrayRef padding) {
  return at::max_pool2d(at::relu(at::conv2d(x, weight, bias, 1, padding)), 2);
}

Tensor leaf(const Tensor& x, at::ScalarType type) {
  return x.defined() ? x.detach().to(type, false, true).requires_grad_() : Tensor();
}

TEST(ConvPool, ForwardAndBackwardAreLibTorchs) {
  kernels::for_each_target([] {
    std::mt19937 generator(1);
    at::manual_seed(1);
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(generator() % n); };
    for (int i = 0; i < 60; ++i) {
      // Squares of 3 and 5 have code of their own.
      const auto shape = below(3);
      const auto h = shape == 0 ? 1 + below(5) : 1 + 2 * shape, w = shape == 0 ? 1 + below(5) : h;
      const auto channels = 1 + below(std::min<std::int64_t>(4, 64 / (h * w))), filters = 1 + below(70);
      const std::vector<std::int64_t> padding{below(h + 1), below(w + 1)};
      auto x = at::randint(-4, 5, {1 + below(4), channels, 6 + below(20), 6 + below(20)}, at::kDouble);
      if (below(4) == 0) x = x.contiguous(at::MemoryFormat::ChannelsLast);
      if (below(5) == 0) x[0][0][3][4] = below(2) == 0 ? std::numeric_limits<double>::quiet_NaN() : -INFINITY;
      // Small integers: sums are exact, and many elements of a window are equal.
      const auto weight = at::randint(-2, 3, {filters, channels, h, w}, at::kDouble);
      const auto bias = below(3) == 0 ? Tensor() : at::randint(-3, 4, {filters}, at::kDouble);
      SCOPED_TRACE(testing::Message() << "case " << i << " " << x.sizes() << " " << weight.sizes() << " padding "
                                      << at::IntArrayRef(padding));
      const auto weight_64 = leaf(weight, at::kDouble), bias_64 = leaf(bias, at::kDouble);
      const auto weight_32 = leaf(weight, at::kFloat), bias_32 = leaf(bias, at::kFloat);
      const auto expected = plain(x, weight_64, bias_64, padding);
      const auto actual = ops::conv2d_relu_max_pool2d(x.to(at::kFloat), weight_32, bias_32, padding);
      ASSERT_TRUE(at::allclose(actual.to(at::kDouble), expected, 0, 0, /*equal_nan=*/true));

      // LibTorch's gradients are NaN wherever a NaN was multiplied, by zero too; ours where it was the largest.
      if (!x.isfinite().all().item<bool>()) continue;
      const auto gradient = at::randint(-3, 4, expected.sizes(), at::kDouble);
      expected.backward(gradient);
      actual.backward(gradient.to(at::kFloat));
      ASSERT_TRUE(at::allclose(weight_32.grad().to(at::kDouble), weight_64.grad(), 0, 0, true));
      if (bias.defined()) {
        ASSERT_TRUE(at::allclose(bias_32.grad().to(at::kDouble), bias_64.grad(), 0, 0, true));
      }
    }
  });
}

TEST(ConvPool, WhereTheImageNeedsAGradientToo) {
  const auto x = at::rand({2, 1, 10, 10}), weight = at::rand({8, 1, 3, 3}) - 0.5;
  const auto x_32 = leaf(x, at::kFloat), weight_32 = leaf(weight, at::kFloat);
  const auto x_64 = leaf(x, at::kDouble), weight_64 = leaf(weight, at::kDouble);
  ops::conv2d_relu_max_pool2d(x_32, weight_32).sum().backward();
  plain(x_64, weight_64, {}, 0).sum().backward();
  EXPECT_TRUE(at::allclose(x_32.grad().to(at::kDouble), x_64.grad(), 1e-5, 1e-5));
  EXPECT_TRUE(at::allclose(weight_32.grad().to(at::kDouble), weight_64.grad(), 1e-5, 1e-5));
}

TEST(ConvPool, GradientsCanBeDifferentiatedAgain) {
  const auto x = at::rand({2, 1, 10, 10}), weight = at::rand({8, 1, 3, 3}) - 0.5, bias = at::rand({8});
  const auto second = [&](const auto& operation, at::ScalarType type) {
    const auto w = leaf(weight, type), b = leaf(bias, type);
    const auto loss = operation(x.to(type), w, b, at::IntArrayRef{1, 1}).pow(2).sum();
    const auto first = torch::autograd::grad({loss}, {w, b}, {}, true, true);
    return torch::autograd::grad({first[0].pow(2).sum() + first[1].sum()}, {w})[0].to(at::kDouble);
  };
  EXPECT_TRUE(at::allclose(second(&ops::conv2d_relu_max_pool2d, at::kFloat), second(&plain, at::kDouble), 1e-4, 1e-3));
}

TEST(ConvPool, RefusesWhatLibTorchRefuses) {
  EXPECT_THROW(ops::conv2d_relu_max_pool2d(at::rand({1, 2, 8, 8}), at::rand({4, 1, 3, 3})), c10::Error);
  EXPECT_THROW(ops::conv2d_relu_max_pool2d(at::rand({1, 1, 8, 8}), at::rand({4, 1, 9, 3})), c10::Error);
  EXPECT_THROW(ops::conv2d_relu_max_pool2d(at::rand({1, 1, 8, 8}), at::rand({4, 1, 3, 3}), at::rand({5})), c10::Error);
}

}  // namespace
}  // namespace lockstep::ops
