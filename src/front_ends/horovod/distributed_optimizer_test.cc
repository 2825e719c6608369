// DistributedOptimizer around LibTorch's optimizers against a plain loop over all ranks' losses; ranks are threads.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "base/expect_says_testing.h"
#include "front_ends/horovod/ranks_testing.h"

namespace lockstep::horovod {
namespace {

namespace hvd = horovod;
using at::Tensor;
using hvd::expect_equal;
using hvd::on_ranks;
using hvd::values;

struct Regression {
  explicit Regression(int rank) {
    net = torch::nn::Linear(4, 2);
    net->to(at::kDouble);
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(3 + rank));
    const at::NoGradGuard no_gradient;
    for (auto& parameter : net->parameters()) parameter.normal_(0, 1, generator);
  }
  static Tensor data(int step, int rank) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * step + rank));
    return at::randn({5, 6}, generator, at::kDouble);
  }
  Tensor loss(int step, int rank) {
    const auto all = data(step, rank);
    return at::mse_loss(net(all.narrow(1, 0, 4)), all.narrow(1, 4, 2));
  }
  torch::nn::Linear net = nullptr;
};

// The plain loop that all ranks' work together comes to.
Tensor alone(int ranks, int steps, int passes, bool sum, const std::vector<int>& steps_of_rank) {
  Regression model(0);
  torch::optim::Adam adam(model.net->parameters(), torch::optim::AdamOptions(0.05));
  for (int step = 0; step < steps; ++step) {
    adam.zero_grad();
    int active = 0;
    for (int rank = 0; rank < ranks; ++rank) active += step < steps_of_rank[static_cast<std::size_t>(rank)] ? 1 : 0;
    for (int rank = 0; rank < ranks; ++rank) {
      if (step >= steps_of_rank[static_cast<std::size_t>(rank)]) continue;
      for (int pass = 0; pass < passes; ++pass) {
        (model.loss(step * passes + pass, rank) / (sum ? 1 : active)).backward();
      }
    }
    adam.step();
  }
  return model.net->weight.detach();
}

void expect_like_alone(int ranks, const hvd::DistributedOptimizerOptions& options, double tolerance) {
  constexpr int kSteps = 50;
  const std::vector<int> steps(static_cast<std::size_t>(ranks), kSteps);
  const auto expected = alone(ranks, kSteps, options.backward_passes_per_step, options.op == hvd::Sum, steps);
  on_ranks(ranks, [&](int rank) {
    Regression model(rank);
    hvd::broadcast_parameters(*model.net, 0);
    torch::optim::Adam adam(model.net->parameters(), torch::optim::AdamOptions(0.05));
    hvd::DistributedOptimizer optimizer(adam, options, model.net->named_parameters());
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      for (int pass = 0; pass < options.backward_passes_per_step; ++pass) {
        model.loss(step * options.backward_passes_per_step + pass, rank).backward();
      }
      optimizer.step();
    }
    EXPECT_LE((model.net->weight.detach() - expected).abs().max().item<double>(), tolerance);
  });
}

// Horovod's source gives zeros to what no rank used, so that momentum and weight decay act on it.
TEST(Horovod, AParameterThatNoRankUsesGetsZeros) {
  on_ranks(2, [](int rank) {
    auto used = at::ones({2}, at::kDouble).requires_grad_(), unused = at::ones({3}, at::kDouble).requires_grad_(),
         used_by_one = at::ones({1}, at::kDouble).requires_grad_();
    torch::optim::SGD sgd({used, unused, used_by_one}, torch::optim::SGDOptions(0.5).weight_decay(0.1));
    hvd::DistributedOptimizer optimizer(sgd);
    auto loss = used.sum();
    if (rank == 1) loss = loss + 3 * used_by_one.sum();
    loss.backward();
    optimizer.step();
    ASSERT_TRUE(unused.grad().defined());
    expect_equal(unused.grad(), at::full({3}, 0.1, at::kDouble) * 0);
    expect_equal(unused.detach(), at::full({3}, 1 - 0.5 * 0.1, at::kDouble));
    expect_equal(used_by_one.detach(), at::full({1}, 1 - 0.5 * (1.5 + 0.1), at::kDouble));
  });
}

TEST(Horovod, ADistributedOptimizerIsOneProcessOnAllData) {
  for (const int ranks : {1, 2, 3}) {
    expect_like_alone(ranks, {}, 1e-9);
    expect_like_alone(ranks, {.op = hvd::Sum}, 1e-9);
    expect_like_alone(ranks, {.backward_passes_per_step = 3}, 1e-9);
  }
}

TEST(Horovod, GradientsOverTcpAreThoseInMemory) {
  const std::vector<int> steps{20, 20};
  const auto expected = alone(2, 20, 1, false, steps);
  hvd::on_ranks_over_tcp(2, [&](int rank) {
    Regression model(rank);
    hvd::broadcast_parameters(*model.net, 0);
    torch::optim::Adam adam(model.net->parameters(), torch::optim::AdamOptions(0.05));
    hvd::DistributedOptimizer optimizer(adam);
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      model.loss(step, rank).backward();
      optimizer.step();
    }
    EXPECT_LE((model.net->weight.detach() - expected).abs().max().item<double>(), 1e-9);
  });
}

TEST(Horovod, AStepBeforeAllPassesTakesWhatThereIs) {
  on_ranks(2, [](int rank) {
    Regression model(0), plain(0);
    torch::optim::SGD sgd(model.net->parameters(), 0.1), reference(plain.net->parameters(), 0.1);
    hvd::DistributedOptimizer optimizer(sgd, {.backward_passes_per_step = 4});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model.loss(step, rank).backward();
      optimizer.step();
      reference.zero_grad();
      ((plain.loss(step, 0) + plain.loss(step, 1)) / 2).backward();
      reference.step();
    }
    EXPECT_LE((model.net->weight - plain.net->weight).abs().max().item<double>(), 1e-12);
  });
}

TEST(Horovod, RanksThatHaveJoinedAnswer) {
  const std::vector<int> steps{3, 7, 5};
  const auto expected = alone(3, 7, 1, false, steps);
  on_ranks(3, [&](int rank) {
    Regression model(0);
    torch::optim::Adam adam(model.net->parameters(), torch::optim::AdamOptions(0.05));
    hvd::DistributedOptimizer optimizer(adam);
    for (int step = 0; step < steps[static_cast<std::size_t>(rank)]; ++step) {
      optimizer.zero_grad();
      model.loss(step, rank).backward();
      optimizer.step();
    }
    if (rank == 1) {
      expect_equal(hvd::allreduce(values(1), {.op = hvd::Sum}), values(1));
      expect_equal(hvd::allreduce(values(1, {3}, at::kFloat)), values(1, {3}, at::kFloat) / 3);
      expect_says(message_of([] { hvd::allgather(values(1)); }),
                  "rank 0 has joined: until all have, ranks call only allreduce");
      expect_says(message_of([] { hvd::allreduce(values(1), {.op = hvd::Max}); }), "has joined");
    }
    EXPECT_EQ(hvd::join(), 1);
    hvd::broadcast_parameters(*model.net, 1);
    EXPECT_LE((model.net->weight.detach() - expected).abs().max().item<double>(), 1e-9);
    hvd::barrier();
    EXPECT_EQ(hvd::join(), 2);
  });
}

// Compares `steps` calls of step(model, optimizer, number, rank) with a plain loop over both ranks' losses.
void expect_like_plain(int steps, const hvd::DistributedOptimizerOptions& options,
                       const std::function<void(Regression&, hvd::DistributedOptimizer<torch::optim::Optimizer>&,
                                                int step, int rank)>& step,
                       const std::function<Tensor(Regression&, int step)>& plain_loss) {
  on_ranks(2, [&](int rank) {
    Regression model(0), plain(0);
    torch::optim::SGD sgd(model.net->parameters(), 0.1), reference(plain.net->parameters(), 0.1);
    hvd::DistributedOptimizer optimizer(sgd, options);
    for (int number = 0; number < steps; ++number) {
      optimizer.zero_grad();
      step(model, optimizer, number, rank);
      reference.zero_grad();
      plain_loss(plain, number).backward();
      reference.step();
    }
    EXPECT_LE((model.net->weight - plain.net->weight).abs().max().item<double>(), 1e-12);
  });
}

Tensor mean_loss(Regression& plain, int step) { return (plain.loss(step, 0) + plain.loss(step, 1)) / 2; }

TEST(Horovod, AStepWithoutABackwardIsOneWithoutGradients) {
  expect_like_plain(
      3, {},
      [](Regression& model, auto& optimizer, int step, int rank) {
        if (step != 1 || rank == 0) model.loss(step, rank).backward();
        optimizer.step();
      },
      [](Regression& plain, int step) { return step == 1 ? plain.loss(1, 0) / 2 : mean_loss(plain, step); });
}

TEST(Horovod, AClosuresGradientsMeet) {
  expect_like_plain(
      3, {.backward_passes_per_step = 2},
      [](Regression& model, auto& optimizer, int step, int rank) {
        optimizer.step([&] {
          optimizer.zero_grad();
          auto loss = model.loss(step, rank);
          loss.backward();
          return loss;
        });
      },
      mean_loss);
}

struct Fails : torch::autograd::Function<Fails> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw InvalidArgument("a backward that fails");
  }
};

TEST(Horovod, AfterAnAccumulatingBackwardThatFailedGradientsMeetAgain) {
  expect_like_plain(
      4, {.backward_passes_per_step = 2},
      [](Regression& model, auto& optimizer, int step, int rank) {
        if (step == 1) {  // the output's own gradient is made before the input's fails
          const auto x = at::ones({1, 4}, at::kDouble).requires_grad_();
          EXPECT_THROW((model.net(Fails::apply(x)) * 0).sum().backward(), std::exception);
          optimizer.zero_grad();
        }
        model.loss(step, rank).backward();
        optimizer.step();
      },
      mean_loss);
}

TEST(Horovod, AnOptimizerThatIsWrappedAnewKeepsItsRanks) {
  on_ranks(2, [](int rank) {
    Regression model(0), plain(0);
    torch::optim::SGD sgd(model.net->parameters(), 0.1), reference(plain.net->parameters(), 0.1);
    using Wrapped = hvd::DistributedOptimizer<torch::optim::Optimizer>;
    auto optimizer = std::make_unique<Wrapped>(sgd);
    for (int step = 0; step < 3; ++step) {
      optimizer = std::make_unique<Wrapped>(sgd);
      optimizer->zero_grad();
      model.loss(step, rank).backward();
      optimizer->step();
      reference.zero_grad();
      mean_loss(plain, step).backward();
      reference.step();
    }
    EXPECT_LE((model.net->weight - plain.net->weight).abs().max().item<double>(), 1e-12);
  });
}

TEST(Horovod, ARankThatHasJoinedAnswersSeveralOptimizersOfOneBackward) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear first(4, 3), second(3, 2);
    hvd::broadcast_parameters(*first, 0);
    hvd::broadcast_parameters(*second, 0);
    torch::optim::SGD of_first(first->parameters(), 0.1), of_second(second->parameters(), 0.1);
    hvd::DistributedOptimizer one(of_first), other(of_second);
    for (int step = 0; step < (rank == 0 ? 4 : 2); ++step) {
      one.zero_grad();
      other.zero_grad();
      second(first(at::ones({2, 4}))).sum().backward();
      one.step();
      other.step();
    }
    EXPECT_EQ(hvd::join(), 0);
  });
}

// Backwards after the gradients were reduced add to them, and so does a plain loop's.
TEST(Horovod, MoreBackwardsThanAStepHasAddUp) {
  for (const auto op : {hvd::Average, hvd::Sum}) {
    for (const int passes : {1, 2}) {
      on_ranks(3, [&](int rank) {
        auto weight = at::zeros({2}, at::kDouble).requires_grad_();
        torch::optim::SGD sgd({weight}, 1);
        hvd::DistributedOptimizer optimizer(sgd, {.op = op, .backward_passes_per_step = passes});
        double expected = 0;
        for (int step = 0; step < 2; ++step) {
          expected = 0;
          for (int k = 0; k < 3 * passes; ++k) {
            (weight * (10 * k + rank + 1)).sum().backward();
            expected += op == hvd::Sum ? 30 * k + 6 : 10 * k + 2;
          }
          optimizer.synchronize();
          EXPECT_TRUE(at::allclose(weight.grad(), at::full({2}, expected, at::kDouble))) << weight.grad() << expected;
          optimizer.step();
          optimizer.step();  // with the same gradients
          EXPECT_TRUE(at::allclose(weight.grad(), at::full({2}, expected, at::kDouble)));
          optimizer.zero_grad(step == 0);
        }
      });
    }
  }
}

TEST(Horovod, RanksThatBeginWithOtherValuesAreNamed) {
  on_ranks(3, [](int rank) {
    auto weight = at::full({2}, rank == 1 ? 2.0 : 1.0, at::kDouble).requires_grad_();
    torch::optim::SGD sgd({weight}, 0.1);
    hvd::DistributedOptimizer optimizer(sgd);
    const auto said = message_of<InvalidArgument>([&] { weight.sum().backward(); });
    expect_says(said, "the ranks begin with other values of its parameters: those of rank 0 have the hash ");
    expect_says(said, "those of rank 1 ");
    expect_says(said, "hvd::broadcast_parameters before the first step");
  });
}

TEST(Horovod, ARankWithoutAStepInTheFirstEpochStepsInTheSecond) {
  on_ranks(3, [](int rank) {
    auto weight = at::zeros({2}, at::kDouble).requires_grad_();
    torch::optim::SGD sgd({weight}, 1);
    hvd::DistributedOptimizer optimizer(sgd);
    for (int epoch = 0; epoch < 2; ++epoch) {
      if (epoch == 1 || rank != 1) {
        optimizer.zero_grad();
        (weight * (rank + 1)).sum().backward();
        optimizer.step();
      }
      hvd::join();
      if (rank == 1 && epoch == 0) weight.detach().fill_(-2);  // as a broadcast does
    }
    expect_equal(weight.detach(), at::full({2}, -4, at::kDouble));
  });
}

// Nobody waits for a rank that has thrown.
TEST(Horovod, RanksThatStartLaterCompareAmongThemselves) {
  on_ranks(4, [](int rank) {
    auto weight = at::full({2}, rank, at::kDouble);
    if (rank < 2) weight.zero_();
    weight.requires_grad_();
    torch::optim::SGD sgd({weight}, 0.1);
    hvd::DistributedOptimizer optimizer(sgd);
    if (rank < 2) weight.sum().backward();
    hvd::join();
    if (rank < 2) optimizer.step();
    expect_says(message_of<InvalidArgument>([&] { weight.sum().backward(); }), "those of rank 2 have the hash ");
  });
}

TEST(Horovod, OptimizersThatDifferAreNamed) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(3, 2 + rank);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    expect_says(message_of([&] { hvd::DistributedOptimizer optimizer(sgd, {}, net->named_parameters()); }),
                "weight Float [2, 3], rank 1 has weight Float [3, 3]");
    torch::nn::Linear same(3, 2);
    torch::optim::SGD other(same->parameters(), 0.1);
    expect_says(message_of([&] { hvd::DistributedOptimizer optimizer(other, {.op = hvd::Max}); }), "op is Max");
    expect_says(message_of([&] { hvd::DistributedOptimizer optimizer(other, {.backward_passes_per_step = 0}); }),
                "at least 1");
    expect_says(message_of([&] { hvd::DistributedOptimizer optimizer(other, {}, net->named_parameters()); }),
                "have no name");
    hvd::DistributedOptimizer optimizer(other);
    expect_says(message_of([&] {
                  if (rank == 0) {
                    same(at::ones({1, 3})).sum().backward();
                  } else {
                    hvd::barrier();
                  }
                }),
                "rank 0 calls a step of DistributedOptimizer 0, rank 1 barrier");
  });
}

}  // namespace
}  // namespace lockstep::horovod
