// How much each backward counts in DistributedDataParallel; ranks are threads.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>

#include "collective/on_ranks_testing.h"
#include "lockstep/ddp/distributed_data_parallel.h"

namespace lockstep::ddp {
namespace {

using at::Tensor;

// One weight and its gradient: forward gives weight * x, so that the gradient of a mean is the mean of x.
struct Scale : torch::nn::Module {
  Scale() { weight = register_parameter("weight", at::zeros({}, at::kDouble)); }
  Tensor forward(const Tensor& x) { return weight * x; }
  Tensor weight;
};

// Batches of examples that all have the value `value`.
struct OfValue {
  std::int64_t examples;
  double value;
};

// The gradient after a step of these batches on each rank: [rank][backward], all but the last without sync.
double gradient_of(const std::vector<std::vector<OfValue>>& ranks) {
  double found = 0;
  std::mutex mutex;
  collective::on_ranks(static_cast<int>(ranks.size()), [&](const Group& group) {
    auto net = std::make_shared<Scale>();
    DistributedDataParallel ddp(net, group);
    const auto& mine = ranks[static_cast<std::size_t>(group.rank())];
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const auto x = at::full({mine[i].examples}, mine[i].value, at::kDouble);
      if (i + 1 < mine.size()) {
        const auto only_here = ddp.no_sync();
        ddp(x).mean().backward();
      } else {
        ddp(x).mean().backward();
      }
    }
    const std::lock_guard lock(mutex);
    if (group.rank() == 0) found = net->weight.grad().item<double>();
  });
  return found;
}

// As many examples count as much, whichever backward and rank they came in.
TEST(Ddp, EachBackwardCountsWithItsOwnExamples) {
  EXPECT_NEAR(gradient_of({{{6, 0}, {6, 0}}, {{6, 1}, {1, 1}}}), 2 * 7.0 / 19, 1e-12);
  EXPECT_NEAR(gradient_of({{{1, 2}, {6, 5}}, {{3, 7}, {4, 11}}}), 2 * (2 + 30 + 21 + 44) / 14.0, 1e-12);
  EXPECT_NEAR(gradient_of({{{4, 1}, {4, 3}}, {{4, 5}, {4, 7}}}), 8, 1e-12);  // as PyTorch's: sums, averaged over ranks
  EXPECT_NEAR(gradient_of({{{5, 1}}, {{2, 8}}}), 21 / 7.0, 1e-12);
}

TEST(Ddp, ForwardsThatShareABackwardCountTogetherAndEvaluationsDoNot) {
  collective::on_ranks(2, [](const Group& group) {
    auto net = std::make_shared<Scale>();
    DistributedDataParallel ddp(net, group);
    const std::int64_t other = group.rank() == 0 ? 6 : 1;  // 12 examples on rank 0, 7 on rank 1
    const auto batch = [&](std::int64_t count) { return at::full({count}, group.rank() + 1.0, at::kDouble); };
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      {
        const at::NoGradGuard evaluating;
        ddp(batch(1000));
      }
      (ddp(batch(6)).mean() + ddp(batch(other)).mean()).backward();
      EXPECT_NEAR(net->weight.grad().item<double>(), (12 * 2 + 7 * 4) / 19.0, 1e-12);
    }
  });
}

// Gradients that were dropped do not count.
TEST(Ddp, WhatZeroGradDropsIsForgotten) {
  collective::on_ranks(2, [](const Group& group) {
    auto net = std::make_shared<Scale>();
    DistributedDataParallel ddp(net, group);
    {
      const auto only_here = ddp.no_sync();
      ddp(at::full({100}, 9.0, at::kDouble)).mean().backward();
    }
    net->zero_grad();
    ddp(at::full({group.rank() == 0 ? 3 : 1}, group.rank() + 1.0, at::kDouble)).mean().backward();
    EXPECT_NEAR(net->weight.grad().item<double>(), 5 / 4.0, 1e-12);
  });
}

TEST(Ddp, AnOptionSaysWhichDimensionHasTheExamples) {
  collective::on_ranks(2, [](const Group& group) {
    auto net = std::make_shared<Scale>();
    DistributedDataParallel ddp(net, group, {.batch_dim = 1});
    const auto x = at::full({5, group.rank() == 0 ? 3 : 1, 2}, group.rank() + 1.0, at::kDouble);
    ddp(x).mean().backward();
    EXPECT_NEAR(net->weight.grad().item<double>(), 5 / 4.0, 1e-12);
  });
}

// A rank whose loop ends earlier: the others hear what would have helped.
TEST(Ddp, UnequalNumbersOfStepsNameJoin) {
  const auto groups = make_thread_groups(2);
  std::string message;
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank, group = groups[static_cast<std::size_t>(rank)]] {
        try {
          auto net = std::make_shared<Scale>();
          DistributedDataParallel ddp(net, group, {.timeout_seconds = 0.5});
          for (int step = 0; step < 2 - rank; ++step) ddp(at::ones({2}, at::kDouble)).mean().backward();
        } catch (const Error& error) {
          message = error.what();
        }
      });
    }
  }
  EXPECT_NE(message.find("join"), std::string::npos) << message;
  EXPECT_EQ(message.rfind("lost rank"), message.find("lost rank")) << message;
}

// Gradients that somebody asks for are that one's, as they are, and no backward of the step.
TEST(Ddp, WhatAutogradGradGivesIsNotWeighed) {
  collective::on_ranks(2, [](const Group& group) {
    auto net = std::make_shared<Scale>();
    DistributedDataParallel ddp(net, group);
    const auto batch = [](std::int64_t count, double value) { return at::full({count}, value, at::kDouble); };
    {
      const auto only_here = ddp.no_sync();
      ddp(batch(6, 1)).mean().backward();
    }
    const auto asked = torch::autograd::grad({ddp(batch(2, 5)).mean()}, {net->weight});
    EXPECT_NEAR(asked[0].item<double>(), 5, 1e-12);
    ddp(batch(4, 2)).mean().backward();
    EXPECT_NEAR(net->weight.grad().item<double>(), 2 * (6 * 1 + 6 * 2) / 12.0, 1e-12);  // the two forwards' examples
  });
}

}  // namespace
}  // namespace lockstep::ddp
