// Pooling of float images (ours) against LibTorch's in double precision, for random geometries.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <random>

#include "kernels/each_target_testing.h"
#include "lockstep/ops/ops.h"

namespace lockstep::ops {
namespace {

using at::Tensor;

struct Case {
  Tensor image;  // double
  std::vector<std::int64_t> size, stride, padding, dilation;
  bool ceil_mode;

  Tensor pool(const Tensor& x) const { return at::max_pool2d(x, size, stride, padding, dilation, ceil_mode); }
};

class Cases {
 public:
  explicit Cases(unsigned seed) : generator_(seed) { at::manual_seed(seed); }

  // Small integers, so that many elements of a window are equal; some NaN and infinities.
  Case next() {
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(generator_() % n); };
    Case c;
    for (int side = 0; side < 2; ++side) {
      c.size.push_back(1 + below(4));
      c.stride.push_back(1 + below(3));
      c.padding.push_back(below(c.size.back() / 2 + 1));
      c.dilation.push_back(1 + below(2));
    }
    c.ceil_mode = below(2) == 0;
    if (below(3) == 0) c.size = c.stride = {2, 2}, c.padding = {0, 0}, c.dilation = {1, 1};
    c.image = at::randint(-3, 4, {1 + below(3), 1 + below(40), 8 + below(40), 8 + below(40)}, at::kDouble);
    if (below(4) == 0) c.image.masked_fill_(at::rand_like(c.image) < 0.1, std::numeric_limits<double>::quiet_NaN());
    if (below(4) == 0) c.image.masked_fill_(at::rand_like(c.image) < 0.7, -std::numeric_limits<double>::infinity());
    if (below(4) == 0) c.image = c.image[0];
    if (c.image.dim() == 4 && below(2) == 0) c.image = c.image.contiguous(at::MemoryFormat::ChannelsLast);
    if (below(5) == 0) c.image = c.image.slice(-1, 1);  // contiguous in no format
    return c;
  }

 private:
  std::mt19937 generator_;
};

TEST(MaxPool2d, ForwardAndBackwardAreLibTorchs) {
  kernels::for_each_target([] {
    Cases cases(1);
    for (int i = 0; i < 150; ++i) {
      const auto c = cases.next();
      SCOPED_TRACE(testing::Message() << "case " << i << " " << c.image.sizes() << " of " << c.image.strides()
                                      << " window " << at::IntArrayRef(c.size) << " stride "
                                      << at::IntArrayRef(c.stride));
      const auto expected_x = c.image.detach().clone().requires_grad_();
      const auto expected = c.pool(expected_x);
      const auto x = c.image.to(at::kFloat).requires_grad_();
      const auto actual = c.pool(x);
      ASSERT_TRUE(at::allclose(actual.to(at::kDouble), expected, 0, 0, /*equal_nan=*/true));
      ASSERT_TRUE(at::allclose(c.pool(x.detach()).to(at::kDouble), expected, 0, 0, /*equal_nan=*/true));

      // Distinct gradients, exact in float, so that each one's place shows.
      const auto gradient = at::arange(1, expected.numel() + 1, at::kDouble).reshape(expected.sizes());
      expected.backward(gradient);
      actual.backward(gradient.to(at::kFloat));
      ASSERT_TRUE(at::equal(x.grad().to(at::kDouble), expected_x.grad()));
      ASSERT_EQ(x.grad().sizes(), x.sizes());
    }
  });
}

TEST(MaxPool2d, ManyThreadsComputeTheSameBits) {
  const int threads = at::get_num_threads();
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const auto image = at::rand({16, 19, 33, 27}).contiguous(format);
    const auto gradient_with = [&](int count) {
      at::set_num_threads(count);
      const auto x = image.detach().clone().requires_grad_();
      at::max_pool2d(x, 2).pow(2).sum().backward();
      return x.grad();
    };
    EXPECT_TRUE(at::equal(gradient_with(1), gradient_with(4)));
  }
  at::set_num_threads(threads);
}

TEST(MaxPool2d, SixteenBitsChooseAsFloatsDo) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const auto x = at::randn({3, 5, 13, 12}).to(type).requires_grad_();
    const auto wide = x.detach().to(at::kDouble).requires_grad_();
    const auto actual = at::max_pool2d(x, 2), expected = at::max_pool2d(wide, 2);
    EXPECT_EQ(actual.scalar_type(), type);
    EXPECT_TRUE(at::equal(actual.to(at::kDouble), expected));
    const auto gradient = at::randn(actual.sizes()).to(type);
    actual.backward(gradient);
    expected.backward(gradient.to(at::kDouble));
    EXPECT_EQ(x.grad().scalar_type(), type);
    EXPECT_TRUE(at::equal(x.grad().to(at::kDouble), wide.grad()));
  }
}

TEST(MaxPool2d, ChannelsLastStaysChannelsLast) {
  const auto x = at::rand({2, 8, 12, 12}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  const auto y = at::max_pool2d(x, 2);
  EXPECT_TRUE(y.is_contiguous(at::MemoryFormat::ChannelsLast));
  y.sum().backward();
  EXPECT_TRUE(x.grad().is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST(MaxPool2d, GradientsCanBeDifferentiatedAgain) {
  const auto second = [](const Tensor& image) {
    const auto x = image.detach().clone().requires_grad_();
    const auto loss = at::max_pool2d(x * x, {3, 2}, {2, 2}, {1, 1}).pow(2).sum();
    const auto first = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
    return torch::autograd::grad({first.pow(2).sum()}, {x})[0];
  };
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const auto x = at::rand({2, 3, 9, 8}, at::kDouble).contiguous(format);
    EXPECT_TRUE(at::allclose(second(x.to(at::kFloat)).to(at::kDouble), second(x), 1e-4, 1e-4));
  }
}

TEST(AvgPool2d, ForwardAndBackwardAreLibTorchs) {
  kernels::for_each_target([] {
    Cases cases(2);
    for (int i = 0; i < 80; ++i) {
      const auto c = cases.next();
      if (!c.image.isfinite().all().item<bool>()) continue;
      SCOPED_TRACE(testing::Message() << "case " << i << " " << c.image.sizes() << " window " << at::IntArrayRef(c.size)
                                      << " stride " << at::IntArrayRef(c.stride));
      const auto expected_x = c.image.detach().clone().requires_grad_();
      const auto x = c.image.to(at::kFloat).requires_grad_();
      const auto expected = at::avg_pool2d(expected_x, c.size, c.stride);
      const auto actual = ops::avg_pool2d(x, c.size, c.stride);
      ASSERT_TRUE(at::allclose(actual.to(at::kDouble), expected, 1e-6, 1e-6));
      const auto gradient = at::rand_like(expected);
      expected.backward(gradient);
      actual.backward(gradient.to(at::kFloat));
      ASSERT_TRUE(at::allclose(x.grad().to(at::kDouble), expected_x.grad(), 1e-5, 1e-5));
    }
  });
}

TEST(AvgPool2d, GradientsCanBeDifferentiatedAgain) {
  const auto second = [](const Tensor& image) {
    const auto x = image.detach().clone().requires_grad_();
    const auto loss = ops::avg_pool2d(x * x, 2).pow(3).sum();
    const auto first = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
    return torch::autograd::grad({first.pow(2).sum()}, {x})[0];
  };
  const auto x = at::rand({2, 3, 9, 8}, at::kDouble);
  EXPECT_TRUE(at::allclose(second(x.to(at::kFloat)).to(at::kDouble), second(x), 1e-4, 1e-4));
}

TEST(MaxPool2d, RefusesWhatLibTorchRefuses) {
  const auto x = at::rand({1, 1, 4, 4});
  EXPECT_THROW(at::max_pool2d(x, 5), c10::Error);
  EXPECT_THROW(at::max_pool2d(x, 2, 0), c10::Error);
  EXPECT_THROW(at::max_pool2d(x, 2, 2, 2), c10::Error);
  EXPECT_THROW(at::max_pool2d(x, {2, 2, 2}), c10::Error);
  EXPECT_THROW(at::max_pool2d(x[0][0], 2), c10::Error);
}

}  // namespace
}  // namespace lockstep::ops
