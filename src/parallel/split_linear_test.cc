#include "parallel/split_linear.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <vector>

namespace lockstep::parallel {
namespace {

// The gradients of x, weight and bias through `product`, which is computed in bfloat16.
template <class Product>
std::vector<Tensor> gradients_of(const Product& product) {
  at::manual_seed(2);
  std::vector<Tensor> inputs{at::randn({6, 3, 16}), at::randn({8, 16}), at::randn({8})};
  for (auto& input : inputs) input.requires_grad_();
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto y = product(inputs[0], inputs[1], inputs[2]);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  const auto later = std::make_shared<WeightGradients>();
  {
    const auto leaving = leave_weights_to(later);
    y.pow(2).sum().backward();
  }
  later->compute();
  std::vector<Tensor> gradients;
  for (const auto& input : inputs) gradients.push_back(input.grad());
  return gradients;
}

TEST(SplitLinear, HasTheGradientsOfLinearUnderAutocast) {
  const auto expected = gradients_of([](const auto& x, const auto& w, const auto& b) { return at::linear(x, w, b); });
  const auto split = gradients_of(split_linear);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(split[i].scalar_type(), at::kFloat);
    EXPECT_LT((split[i] - expected[i]).norm().item<float>(), 0.01 * expected[i].norm().item<float>()) << i;
  }
}

}  // namespace
}  // namespace lockstep::parallel
