// Tests lowerings of the operators that layers and losses use, and random numbers, as lowerings_test.cc does.
#include <cmath>

#include "tpu/lowerings_testing.h"
#include "tpu/trace.h"

namespace lockstep::tpu {
namespace {

TEST_F(EachLowering, Products) {
  same([](const Tensors& x) { return x[0].mm(x[1]); }, {numbers({3, 4}), numbers({4, 5})});
  same([](const Tensors& x) { return x[0].matmul(x[1].transpose(-1, -2)); }, {numbers({2, 3, 4}), numbers({2, 5, 4})});
  same([](const Tensors& x) { return x[0].mv(x[1]) * x[1].dot(x[1]); }, {numbers({3, 4}), numbers({4})});
  same([](const Tensors& x) { return at::linear(x[0], x[1], x[2]); },
       {numbers({2, 3, 4}), numbers({5, 4}), numbers({5})});
  same([](const Tensors& x) { return at::addmm(x[0], x[1], x[2], 0.5, 2); },
       {numbers({5}), numbers({3, 4}), numbers({4, 5})});
  same([](const Tensors& x) { return at::baddbmm(x[0], x[1], x[2], 0.5, 2); },
       {numbers({2, 3, 5}), numbers({2, 3, 4}), numbers({2, 4, 5})});
  for (const bool causal : {false, true})
    same([&](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0, causal); },
         {numbers({2, 2, 5, 4}), numbers({2, 2, 5, 4}), numbers({2, 2, 5, 4})});
  same(
      [](const Tensors& x) {
        return at::einsum("bij,bkj->bik", {x[0], x[1]});
      },
      {numbers({2, 3, 4}), numbers({2, 5, 4})});
}

TEST_F(EachLowering, Convolutions) {
  struct Case {
    Sizes x, weight, stride, padding, dilation;
    std::int64_t groups = 1;
    bool transposed = false;
    Sizes output_padding = {0, 0};
  };
  const std::vector<Case> cases{{{2, 3, 7, 8}, {4, 3, 3, 2}, {2, 3}, {1, 0}, {1, 2}},
                                {{2, 9, 7, 8}, {10, 9, 3, 3}, {2, 1}, {1, 0}, {1, 2}},
                                {{2, 4, 9, 9}, {6, 2, 3, 3}, {2, 2}, {1, 1}, {2, 1}, 2},
                                {{1, 4, 6, 6}, {4, 1, 5, 5}, {1, 1}, {2, 2}, {1, 1}, 4},
                                {{2, 4, 5, 5}, {4, 3, 3, 3}, {2, 2}, {1, 1}, {1, 1}, 2, true, {1, 0}},
                                {{2, 4, 5, 5}, {4, 3, 3, 3}, {1, 1}, {0, 0}, {1, 1}, 1, true}};
  for (const bool for_cpu : {true, false})
    for (const auto& one : cases)
      expect_same(
          [&](const Tensors& x) {
            return at::convolution(x[0], x[1], x[2], one.stride, one.padding, one.dilation, one.transposed,
                                   one.output_padding, one.groups)
                       .relu() *
                   2;
          },
          {numbers(one.x), numbers(one.weight), numbers({one.transposed ? one.weight[1] * one.groups : one.weight[0]})},
          2e-5, &compared, for_cpu);
  same([](const Tensors& x) { return at::conv1d(x[0], x[1], {}, 2, 1); }, {numbers({2, 3, 9}), numbers({4, 3, 3})});
  same([](const Tensors& x) { return at::conv3d(x[0], x[1], {}, 2, 1); },
       {numbers({1, 2, 5, 4, 6}), numbers({3, 2, 3, 3, 3})});
  // Two, with what is between them: pooled, normalized, and looked at in another order.
  same(
      [](const Tensors& x) {
        const auto y = at::max_pool2d(at::conv2d(x[0], x[1]).relu(), {2, 2});
        const auto z = at::conv2d(y * y.mean({0, 2, 3}, true), x[2], {}, 1, 1);
        return z.permute({0, 2, 3, 1}).sum(1) + z.flatten(1).sum() + z.amax({2, 3}).sum() + z.slice(2, 0, 1).sum();
      },
      {numbers({2, 3, 8, 9}), numbers({4, 3, 3, 3}), numbers({2, 4, 3, 3})}, 1e-4);
}

TEST_F(EachLowering, Pooling) {
  for (const auto& [kernel, stride, padding, dilation, ceil] : std::vector<std::tuple<int, int, int, int, bool>>{
           {2, 2, 0, 1, false}, {3, 3, 0, 1, false}, {3, 2, 1, 1, false}, {2, 3, 0, 2, true}})
    same(
        [&, k = kernel, s = stride, p = padding, d = dilation, c = ceil](const Tensors& x) {
          return at::max_pool2d(x[0], {k, k}, {s, s}, {p, p}, {d, d}, c);
        },
        {numbers({2, 3, 8, 9}).round()});  // with ties
  // Lowered as for TPUs: XLA has the operators of their units for windows on CPUs too.
  for (const auto& [kernel, stride, padding, ceil] :
       std::vector<std::tuple<int, int, int, bool>>{{2, 2, 0, false}, {3, 2, 1, true}})
    expect_same(
        [&, k = kernel, s = stride, p = padding, c = ceil](const Tensors& x) {
          return at::max_pool2d(x[0], {k, k}, {s, s}, {p, p}, {1, 1}, c);
        },
        {numbers({2, 3, 8, 9}).round()}, 2e-5, &compared, /*for_cpu=*/false);
  for (const auto& [kernel, stride, padding, ceil, counts] : std::vector<std::tuple<int, int, int, bool, bool>>{
           {2, 2, 0, false, true}, {3, 2, 1, false, true}, {3, 2, 1, true, false}})
    same(
        [&, k = kernel, s = stride, p = padding, c = ceil, i = counts](const Tensors& x) {
          return at::avg_pool2d(x[0], {k, k}, {s, s}, {p, p}, c, i);
        },
        {numbers({2, 3, 8, 9})});
  same([](const Tensors& x) { return at::avg_pool2d(x[0], {2, 3}, {}, 0, false, true, 5); }, {numbers({2, 3, 8, 9})});
  for (const auto& sizes : std::vector<Sizes>{{1, 1}, {3, 2}, {8, 9}})
    same([&](const Tensors& x) { return at::adaptive_avg_pool2d(x[0], sizes); }, {numbers({2, 3, 8, 9})});
}

TEST_F(EachLowering, Norms) {
  same([](const Tensors& x) { return at::layer_norm(x[0], {4}, x[1], x[2]); },
       {numbers({2, 3, 4}), numbers({4}), numbers({4})}, 1e-4);
  same([](const Tensors& x) { return at::layer_norm(x[0], {3, 4}); }, {numbers({2, 3, 4})}, 1e-4);
  same([](const Tensors& x) { return at::group_norm(x[0], 2, x[1], x[2]); },
       {numbers({2, 4, 3, 3}), numbers({4}), numbers({4})}, 1e-4);
  same([](const Tensors& x) { return at::instance_norm(x[0], {}, {}, {}, {}, true, 0.1, 1e-5, false); },
       {numbers({2, 4, 3, 3})}, 1e-4);
}

TEST_F(EachLowering, RecurrentLayers) {
  same(
      [](const Tensors& x) {
        const auto [y, h, c] = at::lstm(x[0], {x[1], x[2]}, {x[3], x[4], x[5], x[6]}, true, 1, 0, true, false, true);
        return y.sum(1) + h[0] * 2 + c[0];
      },
      {numbers({2, 3, 4}), numbers({1, 2, 5}), numbers({1, 2, 5}), numbers({20, 4}), numbers({20, 5}), numbers({20}),
       numbers({20})});
  same(
      [](const Tensors& x) {
        const auto [y, h] = at::gru(x[0], x[1], {x[2], x[3], x[4], x[5]}, true, 1, 0, true, false, true);
        return y.sum(1) + h[0] * 2;
      },
      {numbers({2, 3, 4}), numbers({1, 2, 5}), numbers({15, 4}), numbers({15, 5}), numbers({15}), numbers({15})});
}

TEST_F(EachLowering, Losses) {
  const auto classes = at::randint(5, {7});
  for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
    same([&](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], x[2].detach(), reduction); },
         {numbers({7, 5}), classes, positive({5})});
    same([&](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], {}, reduction, 2); },
         {numbers({7, 5}), classes});
    same([&](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], {}, reduction); },
         {numbers({2, 5, 3, 4}), at::randint(5, {2, 3, 4})});
    for (const auto& loss :
         std::vector<Two>{[&](const auto&x, const auto&y) { return at::mse_loss(x, y, reduction); },
                          [&](const auto&x, const auto&y) { return at::huber_loss(x, y, reduction, 0.7); },
                          [&](const auto&x, const auto&y) { return at::smooth_l1_loss(x, y, reduction, 0.7); },
                          [&](const auto&x, const auto&y) { return at::l1_loss(x, y, reduction); },
                          [&](const auto&x, const auto&y) {
                            return at::binary_cross_entropy_with_logits(x, y.sigmoid(), {}, {}, reduction);
                          },
                          [&](const auto&x, const auto&y) {
                            return at::binary_cross_entropy(x.sigmoid(), y.sigmoid().detach(), {}, reduction);
                          }})
      same([&](const Tensors& x) { return loss(x[0], x[1]); }, {numbers({4, 3}), numbers({4, 3})});
  }
}

// Known answers of Threefry-2x32 with 20 rounds, from Random123's kat_vectors.
TEST_F(EachLowering, RandomWordsAreThoseOfThreefry) {
  Trace trace;
  const auto words = trace.random_words(2);
  const auto program = trace.finish({wrapped(words)});
  EXPECT_EQ(run(program, {at::zeros({2}, at::kInt)}, 1)[0]
                .to(at::kLong)
                .bitwise_and(0xffffffff)
                .equal(at::tensor({0x6b200159L, 0x99ba4efeL}, at::kLong)),
            true);
}

// Each draw of a step is another one, and of the same seed the same.
TEST_F(EachLowering, RandomNumbersHaveTheirDistributions) {
  std::string program;
  {
    Trace trace;
    const auto x = trace.argument({100, 100}, at::kFloat).requires_grad_();
    const auto dropped = torch::autograd::grad({at::dropout(x, 0.25, true).sum()}, {x})[0];
    program = trace.finish({dropped, at::empty_like(x).random_(4), at::empty_like(x).bernoulli_(x.detach() * 0.6),
                            at::dropout(x, 0.25, true), at::rand_like(x), at::rand_like(x), at::randn_like(x),
                            at::bernoulli(x * 0.3), at::randint_like(x, 2, 5), at::randn_like(x) * 2 + 3,
                            at::empty_like(x).uniform_(-1, 3), at::empty_like(x).bernoulli_(0.1)});
    compared.insert(trace.operators().begin(), trace.operators().end());
  }
  // The seed is the argument that the first draw asked for.
  const auto seed = at::tensor({5, 6}, at::kInt);
  const auto ones = at::ones({100, 100});
  const auto results = run(program, {ones, seed}, 12), again = run(program, {ones, seed}, 12);
  const auto others = run(program, {ones, at::tensor({5, 7}, at::kInt)}, 12);
  for (std::size_t i = 0; i < results.size(); ++i) {
    EXPECT_TRUE(results[i].equal(again[i])) << i;
    EXPECT_FALSE(results[i].equal(others[i])) << i;
  }
  EXPECT_FALSE(results[4].equal(results[5]));
  const std::vector<std::pair<double, double>> mean_and_deviation{{1, std::sqrt(1 / 0.75 - 1)},
                                                                  {1.5, std::sqrt(15 / 12.0)},
                                                                  {0.6, std::sqrt(0.24)},
                                                                  {1, std::sqrt(1 / 0.75 - 1)},
                                                                  {0.5, std::sqrt(1 / 12.0)},
                                                                  {0.5, std::sqrt(1 / 12.0)},
                                                                  {0, 1},
                                                                  {0.3, std::sqrt(0.3 * 0.7)},
                                                                  {3, std::sqrt(2 / 3.0)},
                                                                  {3, 2},
                                                                  {1, std::sqrt(16 / 12.0)},
                                                                  {0.1, 0.3}};
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto [mean, deviation] = mean_and_deviation[i];
    EXPECT_NEAR(results[i].mean().item<double>(), mean, 4 * deviation / 100) << i;  // of 10,000 numbers
    EXPECT_NEAR(results[i].std().item<double>(), deviation, 0.03 * deviation) << i;
  }
  EXPECT_EQ(results[8].min().item<double>(), 2);
  EXPECT_EQ(results[8].max().item<double>(), 4);
}

}  // namespace
}  // namespace lockstep::tpu
