// Operators, and the gradients of them, as compiled programs against LibTorch's own.
#include "tpu/trace.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "base/expect_says_testing.h"
#include "lockstep/base/error.h"
#include "tpu/lowerings_testing.h"

namespace lockstep::tpu {
namespace {

class Operators : public testing::Test {
 protected:
  static void SetUpTestSuite() { Trace before_the_first_backward; }
  void SetUp() override { at::manual_seed(1); }
};

TEST_F(Operators, OfOneArgument) {
  for (const auto& function : std::vector<std::function<at::Tensor(const at::Tensor&)>>{
           at::exp, at::expm1, at::tanh, at::sigmoid, at::sin, at::cos, at::erf, at::neg, at::abs, at::sign, at::relu,
           at::silu, at::logical_not, [](const at::Tensor& x) { return at::floor(x) + at::ceil(x); },
           [](const at::Tensor& x) { return at::gelu(x); }, [](const at::Tensor& x) { return at::gelu(x, "tanh"); },
           [](const at::Tensor& x) { return x * 3 - 1; }, [](const at::Tensor& x) { return at::clamp(x, -0.5, 0.7); },
           [](const at::Tensor& x) { return x.pow(2) + x.square() + 2 - x; }})
    expect_same([&](const Tensors& x) { return function(x[0]); }, {numbers({3, 5})});
  for (const auto& function : std::vector<std::function<at::Tensor(const at::Tensor&)>>{at::log, at::log1p, at::sqrt,
                                                                                        at::rsqrt, at::reciprocal})
    expect_same([&](const Tensors& x) { return function(x[0]); }, {positive({3, 5})});
}

TEST_F(Operators, OfTwoArguments) {
  for (const auto& function : std::vector<std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>>{
           [](const at::Tensor&a, const at::Tensor&b) { return a + b; },
           [](const at::Tensor&a, const at::Tensor&b) { return at::sub(a, b, 3); },
           [](const at::Tensor&a, const at::Tensor&b) { return a * b; },
           [](const at::Tensor&a, const at::Tensor&b) { return a / b; }, at::maximum, at::minimum, at::atan2,
           [](const at::Tensor&a, const at::Tensor&b) { return at::pow(a, b); },
           [](const at::Tensor&a, const at::Tensor&b) { return at::where(a > b, a, b * 2); },
           [](const at::Tensor&a, const at::Tensor&b) { return (a <= b).to(at::kFloat) + a.eq(a) * b; }}) {
    for (const auto& [a, b] : std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>>{
             {{3, 4}, {3, 4}}, {{3, 4}, {4}}, {{2, 1, 4}, {3, 1}}, {{}, {5}}})
      expect_same([&](const Tensors& x) { return function(x[0], x[1]); }, {positive(a), positive(b)});
  }
  expect_same([](const Tensors& x) { return x[0] + x[1]; }, {numbers({3}), at::arange(3)});
  expect_same([](const Tensors& x) { return x[0] / x[1]; }, {at::arange(3), at::arange(3) + 1});
}

TEST_F(Operators, Reductions) {
  for (const auto& function : std::vector<std::function<at::Tensor(const at::Tensor&)>>{
           [](const at::Tensor& x) { return x.sum(); },
           [](const at::Tensor& x) {
             return at::sum(x, at::IntArrayRef({0, 2}));
           },
           [](const at::Tensor& x) { return x.mean(); }, [](const at::Tensor& x) { return x.mean(-1, true); },
           [](const at::Tensor& x) { return x.amax({1}); },
           [](const at::Tensor& x) {
             return x.amin({0, 1}, true);
           },
           [](const at::Tensor& x) { return std::get<0>(x.max(1)); },
           [](const at::Tensor& x) { return std::get<1>(x.min(-1, true)); },
           [](const at::Tensor& x) { return x.argmax(1); }, [](const at::Tensor& x) { return x.argmax(); },
           [](const at::Tensor& x) { return x.softmax(1); }, [](const at::Tensor& x) { return x.log_softmax(-1); }})
    expect_same([&](const Tensors& x) { return function(x[0]); }, {numbers({3, 4, 5})});
  expect_same([](const Tensors& x) { return x[0].sum() + x[0].argmax(0); }, {at::randint(9, {5, 4})});
}

TEST_F(Operators, Shapes) {
  for (const auto& function : std::vector<std::function<at::Tensor(const at::Tensor&)>>{
           [](const at::Tensor& x) {
             return x.view({2, -1});
           },
           [](const at::Tensor& x) { return x.transpose(0, 2); },
           [](const at::Tensor& x) {
             return x.permute({2, 0, 1}).reshape({5, -1});
           },
           [](const at::Tensor& x) { return x.select(1, -1); }, [](const at::Tensor& x) { return x.slice(2, 1, 5, 2); },
           [](const at::Tensor& x) {
             return x.unsqueeze(-1).expand({-1, -1, -1, 3}).squeeze(0);
           },
           [](const at::Tensor& x) {
             return at::cat({x, x * 2}, 1);
           },
           [](const at::Tensor& x) {
             return at::stack({x, x}, 1);
           },
           [](const at::Tensor& x) { return x.chunk(2, 1)[1] * x.split(2, 1)[0]; },
           [](const at::Tensor& x) { return x + at::ones({5}, x.options()) + at::full_like(x, 3); }})
    expect_same([&](const Tensors& x) { return function(x[0]); }, {numbers({2, 4, 5})});
}

TEST_F(Operators, Indexing) {
  const auto index = at::randint(3, {2, 4});
  expect_same([](const Tensors& x) { return x[0].gather(1, x[1]); }, {numbers({2, 3}), index});
  expect_same([](const Tensors& x) { return x[0].scatter_add(0, x[1], x[2]); },
              {numbers({3, 5}), index, numbers({2, 4})});
  expect_same([](const Tensors& x) { return x[0].index_select(1, x[1]); }, {numbers({2, 3, 4}), at::randint(3, {5})});
  expect_same([](const Tensors& x) { return x[0].masked_fill(x[0] > 0, 7) * x[0]; }, {numbers({3, 5})});
}

// A change in place is seen through all views.
TEST_F(Operators, InPlaceAndViews) {
  expect_same(
      [](const Tensors& x) {
        auto y = x[0] * 1;
        y.select(0, 1).mul_(x[1]);
        y.slice(1, 0, 4, 3).add_(1);
        const auto seen = y.view({-1}).slice(0, 2, 7);
        y.t().select(0, 2).fill_(5);
        y.relu_();
        return seen * y.sum();
      },
      {numbers({3, 4}), numbers({4})});
}

TEST_F(Operators, Products) {
  expect_same([](const Tensors& x) { return x[0].mm(x[1]); }, {numbers({3, 4}), numbers({4, 5})});
  expect_same([](const Tensors& x) { return x[0].matmul(x[1].transpose(-1, -2)); },
              {numbers({2, 3, 4}), numbers({2, 5, 4})});
  expect_same([](const Tensors& x) { return at::linear(x[0], x[1], x[2]); },
              {numbers({2, 3, 4}), numbers({5, 4}), numbers({5})});
  expect_same([](const Tensors& x) { return at::addmm(x[0], x[1], x[2], 0.5, 2); },
              {numbers({5}), numbers({3, 4}), numbers({4, 5})});
  expect_same([](const Tensors& x) { return at::embedding(x[0], x[1]); }, {numbers({7, 4}), at::randint(7, {2, 3})});
  expect_same([](const Tensors& x) { return at::embedding(x[0], x[1], 2); }, {numbers({3, 4}), at::randint(3, {9})});
}

TEST_F(Operators, Convolutions) {
  struct Case {
    std::vector<std::int64_t> x, weight, stride, padding, dilation;
    std::int64_t groups = 1;
    bool transposed = false;
    std::vector<std::int64_t> output_padding = {0, 0};
  };
  for (const auto& one : std::vector<Case>{{{2, 3, 7, 8}, {4, 3, 3, 3}, {1, 1}, {0, 0}, {1, 1}},
                                           {{2, 3, 7, 8}, {4, 3, 3, 2}, {2, 3}, {1, 0}, {1, 2}},
                                           {{2, 4, 9, 9}, {6, 2, 3, 3}, {2, 2}, {1, 1}, {2, 1}, 2},
                                           {{1, 4, 6, 6}, {4, 1, 5, 5}, {1, 1}, {2, 2}, {1, 1}, 4},
                                           {{2, 4, 5, 5}, {4, 3, 3, 3}, {2, 2}, {1, 1}, {1, 1}, 2, true, {1, 0}}}) {
    expect_same(
        [&](const Tensors& x) {
          return at::convolution(x[0], x[1], x[2], one.stride, one.padding, one.dilation, one.transposed,
                                 one.output_padding, one.groups);
        },
        {numbers(one.x), numbers(one.weight), numbers({one.transposed ? one.weight[1] * one.groups : one.weight[0]})});
  }
  expect_same([](const Tensors& x) { return at::conv1d(x[0], x[1], {}, 2, 1); },
              {numbers({2, 3, 9}), numbers({4, 3, 3})});
}

TEST_F(Operators, MaxPooling) {
  for (const auto& [kernel, stride, padding, dilation, ceil] :
       std::vector<std::tuple<int, int, int, int, bool>>{{2, 2, 0, 1, false}, {3, 2, 1, 1, false}, {2, 3, 0, 2, true}})
    expect_same(
        [&, k = kernel, s = stride, p = padding, d = dilation, c = ceil](const Tensors& x) {
          return at::max_pool2d(x[0], {k, k}, {s, s}, {p, p}, {d, d}, c);
        },
        {numbers({2, 3, 8, 9}).round()});  // with ties
  expect_same(                             // of -infinity alone: the places
      [](const Tensors& x) {
        return std::get<1>(at::max_pool2d_with_indices(x[0] / 0, {3, 3}, {1, 1}, {1, 1}, {1, 1}, false));
      },
      {-positive({1, 4, 4})});
}

TEST_F(Operators, Losses) {
  const auto classes = at::randint(5, {7});
  for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
    expect_same([&](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], {}, reduction); },
                {numbers({7, 5}), classes});
    expect_same([&](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], {}, reduction, 2); },
                {numbers({7, 5}), classes});
    expect_same([&](const Tensors& x) { return at::mse_loss(x[0], x[1], reduction); },
                {numbers({7, 5}), numbers({7, 5})});
  }
}

// Gradients come from a thread of autograd's, to parameters that a module has got as tensors of the device.
TEST_F(Operators, AModulesParameters) {
  torch::nn::Linear linear(4, 3);
  const auto x = numbers({2, 4}), weight = linear->weight.detach().clone(), bias = linear->bias.detach().clone();
  linear(x).square().sum().backward();
  const auto expected = linear->weight.grad().clone();
  std::string program;
  {
    Trace trace;
    const auto traced = trace.argument(x.sizes(), at::kFloat);
    linear->weight = trace.argument(weight.sizes(), at::kFloat).requires_grad_();
    linear->bias = trace.argument(bias.sizes(), at::kFloat).requires_grad_();
    linear(traced).square().sum().backward();
    program = trace.finish({linear->weight.grad()});
  }
  EXPECT_LT((run(program, {x, weight, bias}, 1)[0] - expected).abs().max().item<float>(), 1e-5);
}

TEST_F(Operators, OtherDtypes) {
  expect_same([](const Tensors& x) { return x[0].amin({0}) + x[0].amax({0}) + x[0].argmax(0); },
              {at::tensor({-3'000'000'000, -4'000'000'000, 5L})});
  expect_same([](const Tensors& x) { return std::get<0>(x[0].max(0)); }, {at::tensor({-3, -7}).to(at::kChar)});
  expect_same([](const Tensors& x) { return x[0].amax({0}); }, {at::zeros({2}, at::kBool)});
  expect_same([](const Tensors& x) { return x[0] + (1L << 53) + 1; }, {at::arange(3)});
  expect_same([](const Tensors& x) { return x[0].clamp(0.5, 2.5); }, {at::arange(5)});
  expect_same([](const Tensors& x) { return x[0].mean(at::kDouble); }, {at::arange(5)});
  expect_same(
      [](const Tensors& x) {
        return x[0].floor() + x[0].abs() + at::cat({x[0], x[0]}, 0).sum();
      },
      {at::arange(5)});
  expect_same([](const Tensors& x) { return at::cat({x[0], x[1]}, 0); }, {at::arange(5), numbers({3})});
  expect_same([](const Tensors& x) { return x[0].mean() + x[0].softmax(0).sum(); }, {at::ones({70'000}, at::kHalf)},
              1e-2);
  expect_same([](const Tensors& x) { return at::full({2}, 1.5, x[0].options().dtype(at::kFloat)) + x[0]; },
              {numbers({2})});
  expect_same([](const Tensors& x) { return x[0].argmax(std::nullopt, true); }, {numbers({3, 4})});
}

TEST_F(Operators, NotANumberAndInfinity) {
  const auto infinity = std::numeric_limits<float>::infinity();
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  const auto scores = at::tensor({1.F, -infinity, 2.F, 3.F, 4.F, nan}).view({2, 3});
  Trace trace;
  const auto x = trace.argument({2, 3}, at::kFloat);
  const auto classes = trace.argument({2}, at::kLong);
  const auto loss = at::nll_loss(x, classes, {}, at::Reduction::Sum);
  const auto found =
      run(trace.finish({loss, at::sign(x), at::lerp(x * 0 + 1e8, x * 0 + 1, 1)}), {scores, at::tensor({2L, 0L})}, 3);
  EXPECT_EQ(found[0].item<float>(), -5);
  EXPECT_EQ(found[1][1][2].item<float>(), 0);
  EXPECT_EQ(found[2][0][0].item<float>(), 1);
}

TEST_F(Operators, ResultsOfADtypesChangeMayBeChangedInPlace) {
  expect_same(
      [](const Tensors& x) {
        auto y = x[0].to(at::kDouble);
        y.mul_(2);
        y.select(0, 0).zero_();
        return y.to(at::kFloat);
      },
      {numbers({3, 2})});
}

TEST_F(Operators, OfAnEndedTraceAreRefused) {
  at::Tensor before;
  {
    Trace trace;
    before = trace.argument({3}, at::kFloat);
  }
  Trace trace;
  const auto x = trace.argument({3}, at::kFloat);
  expect_says(message_of<InvalidArgument>([&] { (void)(x + before); }), "has ended");
  expect_says(message_of<Error>([&] { Trace second; }), "another one of this thread is");
}

TEST_F(Operators, WhatCannotBeCompiledIsNamed) {
  Trace trace;
  const auto x = trace.argument({3, 3}, at::kFloat);
  expect_says(message_of<Error>([&] { at::linalg_eigvals(x); }), "cannot be compiled for a TPU");
  expect_says(message_of<InvalidArgument>([&] { trace.finish({at::ones({2})}); }), "no value of the traced program");
  expect_says(message_of<Error>([&] { (void)(x + at::ones({3})); }),
              "aten::add.Tensor cannot be compiled for a TPU: it got a tensor with values in host memory");
  expect_says(message_of<Error>([&] { (void)x.cpu(); }), "make it an output of the program");
}

}  // namespace
}  // namespace lockstep::tpu
