// How much each backward counts in DistributedDataParallel; ranks are threads.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>

#include "base/expect_says_testing.h"
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

// Returns the gradient after a step of each rank's batches: [rank][backward], all but the last without sync.
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
  EXPECT_NEAR(gradient_of({{{0, 9}, {6, 1}}, {{4, 2}, {2, 5}}}), 2 * 24 / 12.0, 1e-12);  // whose mean is no number
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

// One rank's loop ends earlier: the others' error says what would have helped.
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

// Gradients that a caller asks autograd for are returned as they are, and are no backward of the step.
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
    EXPECT_NEAR(net->weight.grad().item<double>(), 2 * (6 * 1 + 4 * 2) / 10.0, 1e-12);
  });
}

Tensor batch_of(std::int64_t examples, double value) { return at::full({examples}, value, at::kDouble); }

double gradient_after(const std::shared_ptr<Scale>& net, const Tensor& loss, bool keep_graph = false) {
  net->zero_grad();
  loss.backward({}, keep_graph);
  return net->weight.grad().item<double>();
}

// Programs that freeze batch normalization train so.
TEST(Ddp, BackwardsInEvalModeCountTheirExamples) {
  collective::on_ranks(2, [](const Group& group) {
    auto net = std::make_shared<Scale>();
    DistributedDataParallel ddp(net, group);
    const bool first = group.rank() == 0;
    EXPECT_NEAR(gradient_after(net, ddp(batch_of(first ? 6 : 2, first ? 1 : 5)).mean()), 16 / 8.0, 1e-12);
    net->eval();
    EXPECT_NEAR(gradient_after(net, ddp(batch_of(4, first ? 1 : 5)).mean()), 3, 1e-12);
    EXPECT_NEAR(gradient_after(net, ddp(batch_of(first ? 1 : 7, first ? 8 : 16)).mean()), (8 + 7 * 16) / 8.0, 1e-12);
  });
}

// A backward counts by the forwards in its graph, whenever they were made, and however often.
TEST(Ddp, BackwardsCountTheForwardsTheyGoThrough) {
  collective::on_ranks(2, [](const Group& group) {
    auto net = std::make_shared<Scale>();
    DistributedDataParallel ddp(net, group);
    const bool first = group.rank() == 0;
    if (first) {  // to be looked at: no backward follows
      EXPECT_EQ(ddp(batch_of(100, 7)).sum().item<double>(), 0);
    }
    const auto one = ddp(batch_of(4, first ? 1 : 2)).mean(), two = ddp(batch_of(first ? 2 : 8, first ? 3 : 13)).mean();
    EXPECT_NEAR(gradient_after(net, one, /*keep_graph=*/true), 1.5, 1e-12);
    EXPECT_NEAR(gradient_after(net, two, /*keep_graph=*/true), (2 * 3 + 8 * 13) / 10.0, 1e-12);
    EXPECT_NEAR(gradient_after(net, one), 1.5, 1e-12);
    EXPECT_NEAR(gradient_after(net, two), (2 * 3 + 8 * 13) / 10.0, 1e-12);
  });
}

// Autograd's list of a backward's operators lacks the one with which it begins.
TEST(Ddp, AForwardOfOneOperatorCounts) {
  struct Product : Scale {
    Tensor forward(const Tensor& x) { return weight.expand_as(x).dot(x); }
  };
  struct Scalar : Scale {
    Tensor forward(const Tensor& x) { return weight * x.sum(); }
  };
  collective::on_ranks(2, [](const Group& group) {
    const auto check = [&](auto net) {
      DistributedDataParallel ddp(net, group);
      ddp(batch_of(group.rank() == 0 ? 1 : 3, 1)).backward();
      EXPECT_NEAR(net->weight.grad().template item<double>(), (1 * 1 + 3 * 3) / 4.0, 1e-12);
    };
    check(std::make_shared<Product>());
    check(std::make_shared<Scalar>());
  });
}

TEST(Ddp, ABackwardWhoseExamplesAreNotKnownIsRefusedUntilTheyAreTold) {
  collective::on_ranks(2, [](const Group& group) {
    auto net = std::make_shared<Scale>();
    DistributedDataParallel ddp(net, group);
    const bool first = group.rank() == 0;
    const auto x = batch_of(first ? 6 : 2, first ? 1 : 5);
    const auto said = message_of<InvalidArgument>([&] { ddp->forward(x).mean().backward(); });
    expect_says(said, "no forward that was called through ddp is in the graph of this backward");
    expect_says(said, "ddp.add_examples(n)");
    ddp.add_examples(static_cast<double>(x.size(0)));
    const auto loss = ddp->forward(x).mean();
    EXPECT_NEAR(gradient_after(net, loss, /*keep_graph=*/true), 16 / 8.0, 1e-12);
    EXPECT_NEAR(gradient_after(net, loss), 16 / 8.0, 1e-12);  // the same examples again
    expect_says(message_of<InvalidArgument>([&] { ddp->forward(x).mean().backward(); }), "add_examples");
    EXPECT_NEAR(gradient_after(net, ddp.forward(x).mean()), 16 / 8.0, 1e-12);
  });
}

TEST(Ddp, WithoutWeightsEveryBackwardCountsTheSameHoweverItsForwardWasCalled) {
  collective::on_ranks(2, [](const Group& group) {
    auto net = std::make_shared<Scale>();
    DistributedDataParallel ddp(net, group, {.weigh_by_examples = false});
    const bool first = group.rank() == 0;
    EXPECT_NEAR(gradient_after(net, ddp->forward(batch_of(first ? 6 : 2, first ? 1 : 5)).mean()), 3, 1e-12);
  });
}

TEST(Ddp, WhatWasToldHoldsForAnotherBackwardOfTheSameGraph) {
  collective::on_ranks(2, [](const Group& group) {
    for (const bool weighs : {false, true}) {
      auto net = std::make_shared<Scale>();
      DistributedDataParallel ddp(net, group, {.weigh_by_examples = weighs});
      const bool first = group.rank() == 0;
      const auto x = batch_of(first ? 6 : 2, first ? 1 : 5);
      const double told = first ? 3 : 0;  // 0 is a number too
      // The backward has the 8 examples that forwards recorded, or none, beside those that were told.
      const double expected = weighs ? (9 * 1 + 2 * 5) / 11.0 : 1;
      const auto loss = ddp(x).mean();
      ddp.add_examples(told);
      for (const bool keep : {true, true, false}) EXPECT_NEAR(gradient_after(net, loss, keep), expected, 1e-12);
      EXPECT_NEAR(gradient_after(net, ddp(x).mean()), weighs ? 16 / 8.0 : 3, 1e-12);  // of another graph
    }
  });
}

struct Hidden {
  Tensor x;
};

struct ScaleOfMany : Scale {
  Tensor forward(const std::tuple<int, std::pair<Tensor, Tensor>>& inputs) {
    return weight * std::get<1>(inputs).first;
  }
  Tensor forward(const std::string&, double factor, const std::optional<Tensor>& x) { return weight * *x * factor; }
  Tensor forward(const std::vector<Tensor>& inputs) { return weight * inputs[0]; }
  Tensor forward(const Hidden& hidden) { return weight * hidden.x; }
};

TEST(Ddp, ExamplesAreCountedInTuplesAndAskedForWhereInputsHideThem) {
  collective::on_ranks(2, [](const Group& group) {
    auto net = std::make_shared<ScaleOfMany>();
    DistributedDataParallel ddp(net, group);
    const bool first = group.rank() == 0;
    const auto x = batch_of(first ? 6 : 2, first ? 1 : 5);
    EXPECT_NEAR(gradient_after(net, ddp(std::tuple(3, std::pair(x, x.sum()))).mean()), 2, 1e-12);
    EXPECT_NEAR(gradient_after(net, ddp(std::string("name"), 1.0, std::optional(x)).mean()), 2, 1e-12);
    const std::string hidden = "the inputs of a forward do not tell how many examples it has";
    expect_says(message_of<InvalidArgument>([&] { ddp(std::vector{x, x}).mean().backward(); }), hidden);
    expect_says(message_of<InvalidArgument>([&] { ddp(Hidden{x}).mean().backward(); }), hidden);
    ddp.add_examples(static_cast<double>(x.size(0)));
    EXPECT_NEAR(gradient_after(net, ddp(Hidden{x}).mean()), 2, 1e-12);
  });
}

}  // namespace
}  // namespace lockstep::ddp
