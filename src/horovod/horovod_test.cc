// Horovod's calls against plain computations; ranks are threads.
#include "lockstep/horovod.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <numeric>
#include <thread>

#include "base/expect_says.h"
#include "horovod/session.h"

namespace lockstep {
namespace {

namespace hvd = horovod;
using at::Tensor;

void on_ranks(int size, const std::function<void(int)>& body, double timeout_seconds = 60) {
  const auto groups = make_thread_groups(size);
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto index = static_cast<std::size_t>(rank);
        const World world{.rank = rank, .size = size, .local_rank = rank, .local_size = size};
        const hvd::Session::Use use(
            std::make_shared<hvd::Session>(hvd::Session::Position{world}, groups[index], timeout_seconds));
        try {
          body(rank);
        } catch (const std::exception& error) {
          errors[index] = error.what();
          groups[index].abort(error.what());
        }
      });
    }
  }
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

void expect_equal(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.scalar_type(), b.scalar_type());
  EXPECT_TRUE(at::equal(a, b)) << a << "\nand\n" << b;
}

Tensor values(int rank, at::IntArrayRef sizes = {2, 3}, at::ScalarType dtype = at::kDouble) {
  const auto count = c10::multiply_integers(sizes);
  return (at::arange(count, at::kDouble).reshape(sizes) + 10 * rank).to(dtype);
}

TEST(Horovod, NeedsInit) {
  EXPECT_FALSE(hvd::is_initialized());
  expect_says(message_of([] { hvd::rank(); }), "horovod::init() was not called");
  expect_says(message_of([] { hvd::allreduce(at::ones({1})); }), "horovod::init() was not called");
}

TEST(Horovod, AloneEverythingWorks) {
  hvd::InitOptions options;
  options.cluster = Cluster{};
  hvd::init(options);
  EXPECT_EQ(hvd::size(), 1);
  EXPECT_EQ(hvd::local_size(), 1);
  EXPECT_EQ(hvd::cross_size(), 1);
  EXPECT_TRUE(hvd::is_homogeneous());
  expect_equal(hvd::allreduce(values(1)), values(1));
  expect_equal(hvd::allgather(values(1)), values(1));
  EXPECT_EQ(hvd::join(), 0);
  hvd::barrier();
  hvd::shutdown();
  EXPECT_FALSE(hvd::is_initialized());
  hvd::shutdown();
}

TEST(Horovod, AllreduceOfEveryOperatorAndDtype) {
  on_ranks(3, [](int rank) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte}) {
      const auto mine = values(rank, {2, 3}, dtype);
      const auto all = at::stack({values(0), values(1), values(2)});
      expect_equal(hvd::allreduce(mine, {.op = hvd::Sum}), all.sum(0).to(dtype));
      expect_equal(hvd::allreduce(mine), all.mean(0).to(dtype));
      expect_equal(hvd::allreduce(mine, {.op = hvd::Min}), all.amin(0).to(dtype));
      expect_equal(hvd::allreduce(mine, {.op = hvd::Max}), all.amax(0).to(dtype));
    }
    expect_equal(hvd::allreduce(values(rank) + 1, {.op = hvd::Product}),
                 (values(0) + 1) * (values(1) + 1) * (values(2) + 1));
    expect_equal(hvd::allreduce(at::scalar_tensor(rank)), at::scalar_tensor(1));
    expect_equal(hvd::allreduce(values(rank).t(), {.op = hvd::Sum}), (3 * values(1)).t());  // no contiguous memory
    expect_equal(hvd::allreduce(values(rank), {.op = hvd::Sum, .prescale_factor = 0.5, .postscale_factor = 3}),
                 values(1) * 4.5);
  });
}

TEST(Horovod, InPlaceGroupedAndAsynchronous) {
  on_ranks(2, [](int rank) {
    auto mine = values(rank).requires_grad_();
    hvd::allreduce_(mine);
    EXPECT_TRUE(mine.requires_grad());
    expect_equal(mine.detach(), values(0) + 5);

    const hvd::Tensors several{values(rank), values(rank, {4}, at::kFloat), values(rank, {1, 2})};
    auto summed = hvd::grouped_allreduce(several, {.op = hvd::Sum});
    ASSERT_EQ(summed.size(), 3);
    for (std::size_t i = 0; i < several.size(); ++i) {
      expect_equal(summed[i], values(0, several[i].sizes(), several[i].scalar_type()) +
                                  values(1, several[i].sizes(), several[i].scalar_type()));
    }
    hvd::grouped_allreduce_({several[0], several[1]}, {.op = hvd::Sum});
    expect_equal(several[0], summed[0]);
    expect_equal(several[1], summed[1]);

    auto changing = values(rank);
    const auto first = hvd::allreduce_async(changing, {.op = hvd::Sum});
    const auto second = hvd::broadcast_async(changing, 1);
    const auto third = hvd::allgather_async(changing);
    changing.zero_();  // they took it as it was
    expect_equal(hvd::synchronize(third), at::cat({values(0), values(1)}));
    EXPECT_TRUE(hvd::poll(first));
    expect_equal(hvd::synchronize(first), values(0) + values(1));
    expect_equal(hvd::synchronize(second), values(1));
  });
}

TEST(Horovod, CompressionRoundsOnceAndKeepsTheDtype) {
  on_ranks(2, [](int rank) {
    const auto mine = at::full({3}, 1.0 + rank * 1e-4, at::kFloat);
    const auto half = hvd::allreduce(mine, {.compression = hvd::Compression::fp16});
    EXPECT_EQ(half.scalar_type(), at::kFloat);
    expect_equal(half, ((mine - rank * 1e-4 + (mine - rank * 1e-4 + 1e-4).to(at::kHalf).to(at::kFloat)) / 2)
                           .to(at::kHalf)
                           .to(at::kFloat));
    EXPECT_EQ(hvd::allreduce(mine.to(at::kDouble), {.compression = hvd::Compression::bf16}).scalar_type(), at::kDouble);
    const auto numbers = values(rank, {3}, at::kLong);
    expect_equal(hvd::allreduce(numbers, {.op = hvd::Sum, .compression = hvd::Compression::bf16}),
                 values(0, {3}, at::kLong) + values(1, {3}, at::kLong));
  });
}

TEST(Horovod, AllgatherBroadcastAlltoallReducescatter) {
  on_ranks(3, [](int rank) {
    expect_equal(hvd::allgather(values(rank, {rank + 1, 2})),
                 at::cat({values(0, {1, 2}), values(1, {2, 2}), values(2, {3, 2})}));
    expect_equal(hvd::allgather(values(rank, {rank == 1 ? 0 : 2})), at::cat({values(0, {2}), values(2, {2})}));
    const auto gathered = hvd::grouped_allgather({values(rank, {1}), values(rank, {rank, 1}, at::kFloat)});
    expect_equal(gathered[0], at::cat({values(0, {1}), values(1, {1}), values(2, {1})}));
    expect_equal(gathered[1], at::cat({values(1, {1, 1}, at::kFloat), values(2, {2, 1}, at::kFloat)}));

    expect_equal(hvd::broadcast(values(rank), 2), values(2));
    auto own = values(rank);
    hvd::broadcast_(own, 1);
    expect_equal(own, values(1));

    // Rank r sends r + s rows to rank s.
    std::vector<std::int64_t> splits{rank, rank + 1, rank + 2};
    const auto total = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
    const auto swapped = hvd::alltoall(at::full({total, 2}, rank), splits);
    EXPECT_EQ(swapped.received_splits, splits);
    std::vector<Tensor> expected;
    for (int r = 0; r < 3; ++r) expected.push_back(at::full({r + rank, 2}, r));
    expect_equal(swapped.output, at::cat(expected));
    expect_equal(hvd::alltoall(values(rank, {3})).output, at::arange(3, at::kDouble) * 10 + rank);

    // 4 rows for 3 ranks: 2, 1, 1.
    const auto sum = values(0, {4, 2}) + values(1, {4, 2}) + values(2, {4, 2});
    const auto mine = rank == 0 ? sum.slice(0, 0, 2) : sum.slice(0, rank + 1, rank + 2);
    expect_equal(hvd::reducescatter(values(rank, {4, 2}), {.op = hvd::Sum}), mine);
    const auto both = hvd::grouped_reducescatter({values(rank, {4, 2}), values(rank, {3})});
    expect_equal(both[0], mine / 3);
    expect_equal(both[1], values(1, {3}).slice(0, rank, rank + 1));
  });
}

TEST(Horovod, CallsThatDifferAreNamedOnAllRanksAndTheNextIsGood) {
  on_ranks(2, [](int rank) {
    const std::string shapes = message_of([&] { hvd::allreduce(values(rank, {2 + rank})); });
    EXPECT_EQ(shapes,
              "the ranks' calls differ: rank 0 calls allreduce (mean) of Double [2], rank 1 allreduce (mean) of "
              "Double [3]");
    const auto kinds = message_of([&] { rank == 0 ? hvd::barrier() : void(hvd::broadcast(values(0), 0)); });
    EXPECT_NE(kinds.find("rank 0 calls barrier, rank 1 broadcast from rank 0 of"), std::string::npos) << kinds;
    expect_says(message_of([&] { hvd::allreduce(values(0), {.name = rank == 0 ? "a" : "b"}); }), "allreduce \"b\"");
    expect_says(message_of([&] { hvd::allgather(values(0, {1, 2 + rank})); }), "[rows, 3]");
    expect_equal(hvd::allreduce(values(rank)), values(0) + 5);
  });
}

TEST(Horovod, BadArguments) {
  on_ranks(1, [](int) {
    expect_says(message_of([] { hvd::allreduce(Tensor()); }), "allreduce: the tensor is undefined");
    expect_says(message_of([] { hvd::allreduce(at::ones({1}, at::kBool)); }), "Bool");
    expect_says(message_of([] { hvd::grouped_allreduce({}); }), "there are no tensors");
    expect_says(message_of([] { hvd::broadcast(at::ones({1}), 1); }), "root_rank is 1; it must be from 0 to 0");
    expect_says(message_of([] { hvd::allgather(at::ones({})); }), "the tensor is a scalar");
    expect_says(message_of([] { hvd::alltoall(at::ones({2}), {1}); }), "splits are 1; they must be 1 numbers");
    expect_says(message_of([] { hvd::broadcast_object(1, -1); }), "root_rank is -1");
  });
}

TEST(Horovod, ARankThatIsGoneIsNamedAndNothingWaitsForLong) {
  on_ranks(
      2,
      [](int rank) {
        if (rank == 1) return;
        expect_says(message_of([] { hvd::allreduce(at::ones({1})); }), "rank 1");
      },
      0.5);
}

TEST(Horovod, ObjectsParametersAndOptimizers) {
  on_ranks(2, [](int rank) {
    const auto shared = hvd::broadcast_object(c10::IValue(rank == 1 ? "the one" : "another"), 1);
    EXPECT_EQ(shared.toStringRef(), "the one");
    const auto all = hvd::allgather_object(c10::List<std::int64_t>(std::vector<std::int64_t>(rank + 1, rank)));
    ASSERT_EQ(all.size(), 2);
    EXPECT_EQ(all[0].toIntVector(), (std::vector<std::int64_t>{0}));
    EXPECT_EQ(all[1].toIntVector(), (std::vector<std::int64_t>{1, 1}));

    torch::nn::Linear net(3, 2);
    {
      const at::NoGradGuard no_gradient;
      net->weight.fill_(rank + 1);
      net->bias.fill_(rank + 3);
    }
    torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(rank == 0 ? 0.125 : 0.5));
    if (rank == 1) {
      net(at::ones({1, 3})).sum().backward();
      adam.step();
    }
    hvd::broadcast_parameters(*net, 1);
    hvd::broadcast_optimizer_state(adam, 1);
    const auto weights = hvd::allgather(net->weight.detach());
    expect_equal(weights.slice(0, 0, 2), weights.slice(0, 2, 4));
    EXPECT_LT(weights.max().item<float>(), 2);
    EXPECT_EQ(adam.param_groups()[0].options().get_lr(), 0.5);
    ASSERT_EQ(adam.state().size(), 2);
    adam.zero_grad();
    net(at::ones({1, 3})).sum().backward();
    adam.step();
    expect_equal(hvd::allreduce(net->weight.detach(), {.op = hvd::Min}), net->weight.detach());
  });
}

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

TEST(Horovod, ADistributedOptimizerIsOneProcessOnAllData) {
  for (const int ranks : {1, 2, 3}) {
    expect_like_alone(ranks, {}, 1e-9);
    expect_like_alone(ranks, {.op = hvd::Sum}, 1e-9);
    expect_like_alone(ranks, {.backward_passes_per_step = 3}, 1e-9);
  }
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

// Makes `steps` of what `step(model, optimizer, number)` does, beside a plain loop over both ranks' losses.
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

TEST(Horovod, GroupedCallsThatDifferLeaveTheNextGood) {
  on_ranks(2, [](int rank) {
    const hvd::Tensors one{values(rank)}, two{values(rank), values(rank)};
    const auto& mine = rank == 0 ? one : two;
    for (int round = 0; round < 20; ++round) {
      expect_says(message_of([&] { hvd::grouped_allreduce(mine); }), "2 tensors");
      expect_says(message_of([&] { hvd::grouped_allgather(mine); }), "2 tensors");
      expect_says(message_of([&] { hvd::grouped_reducescatter(mine); }), "2 tensors");
      const auto compression = rank == 0 ? hvd::Compression::none : hvd::Compression::bf16;
      expect_says(message_of([&] { hvd::allreduce(values(rank), {.compression = compression}); }), "sent as bf16");
      expect_equal(hvd::allreduce(values(rank)), values(0) + 5);
    }
  });
}

TEST(Horovod, RootsOptimizerIsAllRanksEvenWhereItHasNoState) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(3, 2);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    if (rank == 1) {
      net(at::ones({1, 3})).sum().backward();
      sgd.step();
    }
    hvd::broadcast_optimizer_state(sgd, 0);
    EXPECT_TRUE(sgd.state().empty());
    torch::optim::Adam adam(net->parameters());
    torch::optim::Optimizer& mine = rank == 0 ? static_cast<torch::optim::Optimizer&>(adam) : sgd;
    expect_says(message_of([&] { hvd::broadcast_optimizer_state(mine, 0); }), "torch::optim::SGD");
  });
}

TEST(Horovod, OptimizersThatDifferAreNamed) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(3, 2 + rank);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    expect_says(message_of([&] { hvd::DistributedOptimizer optimizer(sgd, {}, net->named_parameters()); }),
                "weight Float [2, 3], worker 1 has weight Float [3, 3]");
    torch::nn::Linear same(3, 2);
    torch::optim::SGD other(same->parameters(), 0.1);
    expect_says(message_of([&] { hvd::DistributedOptimizer optimizer(other, {.op = hvd::Max}); }), "op is max");
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
}  // namespace lockstep
