// Experts on several ranks against one process that has all of them and all tokens, in double precision.
#include "lockstep/parallel/moe.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <mutex>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "collective/ranks_testing.h"
#include "lockstep/parallel/gradients.h"
#include "lockstep/parallel/recompute.h"
#include "parallel/transformer_testing.h"

namespace lockstep::parallel {
namespace {

constexpr std::int64_t kWidth = kExpertWidth;
constexpr int kExpertSteps = 50;

MoE make_moe(const MoEOptions& options, const Communicator& ranks = {}) {
  static std::mutex making;
  const std::lock_guard lock(making);
  torch::manual_seed(2);
  MoE moe(
      options, kWidth, [] { return Expert(); }, ranks);
  moe->to(at::kDouble);
  return moe;
}

at::Tensor tokens_of(int step) {
  return at::sin(at::arange(24 * kWidth, at::kDouble).view({4, 6, kWidth}) * 1.7 + step);
}

template <class Finish>
void train(MoE& moe, const std::function<at::Tensor(const at::Tensor&)>& part, const Finish& finish) {
  torch::optim::AdamW adamw(moe->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kExpertSteps; ++step) {
    const auto x = part(tokens_of(step));
    adamw.zero_grad();
    const auto y = moe(x);
    ((y - x.flip(-1)).pow(2).mean() + 0.01 * moe->balance_loss()).backward();
    finish();
    adamw.step();
  }
}

TEST(MoE, TrainsAsOneProcess) {
  for (const auto& options : {MoEOptions{.experts = 12, .top_k = 1}, MoEOptions{.experts = 12, .top_k = 2},
                              MoEOptions{.experts = 12, .top_k = 2, .capacity_factor = 1}}) {
    auto whole = make_moe(options);
    train(
        whole, [](const at::Tensor& x) { return x; }, [&] { clip_grad_norm(whole->parameters(), 0.1); });
    EXPECT_EQ(whole->dropped() > 0, options.capacity_factor > 0);
    for (const int ranks : {2, 3, 4}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, top_k " << options.top_k << ", capacity "
                                      << options.capacity_factor);
      collective::on_ranks(ranks, [&](const Group& group) {
        const Communicator communicator(group, 30);
        auto moe = make_moe(options, communicator);
        const auto part = [&](const at::Tensor& x) {
          return x.flatten(0, 1).chunk(ranks)[static_cast<std::size_t>(group.rank())];
        };
        train(moe, part, [&] {
          average_gradients(moe->parameters(), communicator);
          clip_grad_norm(moe->parameters(), 0.1);
        });
        EXPECT_LT(largest_difference(parameters_of(*moe), parameters_of(*whole)), 1e-9);
        EXPECT_EQ(moe->tokens_of_experts(), whole->tokens_of_experts());
        EXPECT_EQ(moe->dropped(), whole->dropped());
      });
    }
  }
}

TEST(MoE, RanksMayHaveUnequalNumbersOfTokens) {
  const auto x = tokens_of(0).flatten(0, 1);
  const auto expected = make_moe({.experts = 4})(x);
  collective::on_ranks(2, [&](const Group& group) {
    auto moe = make_moe({.experts = 4}, group);
    for (const std::int64_t first : {24, 20, 1}) {  // of the first rank; the other one has the rest, which may be none
      const auto y = group.rank() == 0 ? moe(x.narrow(0, 0, first)) : moe(x.narrow(0, first, 24 - first));
      const auto own = group.rank() == 0 ? expected.narrow(0, 0, first) : expected.narrow(0, first, 24 - first);
      EXPECT_TRUE(at::allclose(y, own, 1e-12, 1e-12));
    }
  });
}

TEST(MoE, BalanceLossIsOneWhereTokensAreSpreadEvenly) {
  auto moe = make_moe({.experts = 2, .top_k = 1});
  const at::NoGradGuard no_gradient;
  moe->named_parameters()["gate"].zero_().select(1, 0).copy_(at::tensor({1.0, -1.0}));
  auto x = at::zeros({4, kWidth}, at::kDouble);
  x.select(1, 0).copy_(at::tensor({1.0, -1.0, 1.0, -1.0}));
  moe(x);
  EXPECT_NEAR(moe->balance_loss().item<double>(), 1, 1e-12);
  moe(x.abs());  // all to one
  EXPECT_GT(moe->balance_loss().item<double>(), 1.5);
}

// Two layers of equal sizes: mixed, tokens would go through the other layer's experts.
TEST(MoE, RanksInAnotherLayerAreToldWhich) {
  for (const bool in_backward : {false, true}) {
    SCOPED_TRACE(in_backward ? "backward" : "forward");
    const auto errors = collective::run_ranks({.group = {.backend = "threads"}}, [&](const Group& group) {
      auto first = make_moe({.experts = 4}, {group, 30}), second = make_moe({.experts = 4}, {group, 30});
      const auto x = tokens_of(0).requires_grad_();
      if (!in_backward) {
        (group.rank() == 0 ? first : second)(x);
        return;
      }
      const auto of_first = first(x), of_second = second(x);
      (group.rank() == 0 ? of_first : of_second).sum().backward();
    });
    for (const auto& error : errors) {
      ASSERT_NE(error, nullptr);
      const auto said = message_of<InvalidArgument>([&] { std::rethrow_exception(error); });
      expect_says(said, in_backward ? "for the backward of MoE 1, rank 1 calls" : "for MoE 1, rank 1 calls");
      expect_says(said, in_backward ? "for the backward of MoE 2" : "for MoE 2");
    }
  }
}

TEST(MoE, HasNoBalanceLossOfARecomputedForward) {
  auto moe = make_moe({.experts = 4});
  const auto x = tokens_of(0);
  const auto expected = [&] {
    const at::NoGradGuard no_gradient;
    moe(x);
    return moe->balance_loss().item<double>();
  }();
  recompute(moe, x);
  expect_says(message_of<InvalidArgument>([&] { moe->balance_loss(); }), "has no gradient: call the layer itself");
  const at::NoGradGuard no_gradient;
  EXPECT_EQ(moe->balance_loss().item<double>(), expected);
}

TEST(MoE, RefusesWhatDoesNotFit) {
  collective::on_ranks(2, [&](const Group& group) {
    expect_says(message_of<InvalidArgument>([&] { make_moe({.experts = 3}, group); }),
                "3 experts; it must be a multiple of the number of ranks, 2");
    expect_says(message_of<InvalidArgument>([&] { make_moe({.experts = 4, .top_k = 5}, group); }),
                "top_k is 5; it must be from 1 to the number of experts, 4");
  });
  expect_says(message_of<InvalidArgument>([&] {
                make_moe({})(at::zeros({2, 5}, at::kDouble));
              }),
              "x has shape [2, 5]; its last dimension must be 6");
}

}  // namespace
}  // namespace lockstep::parallel
