// Horovod's operations against plain computations; ranks are threads.
#include "lockstep/horovod.h"

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <numeric>

#include "base/expect_says_testing.h"
#include "front_ends/horovod/ranks_testing.h"

namespace lockstep::horovod {
namespace {

namespace hvd = horovod;
using at::Tensor;
using hvd::expect_equal;
using hvd::on_ranks;
using hvd::values;

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
    for (const auto dtype :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte, at::kChar, at::kShort}) {
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

TEST(Horovod, WhatOneRankMayNotCallDoesNotWakeThoseThatJoined) {
  on_ranks(2, [](int rank) {
    if (rank == 0) {
      expect_says(message_of<InvalidArgument>([] { hvd::allreduce(at::ones({1}, at::kBool)); }), "not by Average");
      expect_equal(hvd::allreduce(values(0), {.op = hvd::Sum}), values(0));
    }
    EXPECT_EQ(hvd::join(), 0);
  });
}

TEST(Horovod, TheSameOverTcpAndAfterManyCalls) {
  hvd::on_ranks_over_tcp(3, [](int rank) {
    const auto sum = values(0, {4, 2}) + values(1, {4, 2}) + values(2, {4, 2});
    for (int round = 0; round < 30; ++round) {
      expect_equal(hvd::allreduce(values(rank, {4, 2}), {.op = hvd::Sum}), sum);
      expect_equal(hvd::allgather(values(rank, {rank + 1})), at::cat({values(0, {1}), values(1, {2}), values(2, {3})}));
      expect_equal(hvd::alltoall(values(rank, {3})).output, at::arange(3, at::kDouble) * 10 + rank);
      expect_equal(hvd::reducescatter(values(rank, {3})), values(1, {3}).slice(0, rank, rank + 1));
      expect_equal(hvd::broadcast(values(rank), 2), values(2));
      expect_says(message_of([&] { hvd::allreduce(values(rank, {2 + rank})); }), "the ranks' calls differ");
    }
    if (rank == 2) {
      expect_equal(hvd::allreduce(values(1), {.op = hvd::Sum}), values(1));
    }
    EXPECT_EQ(hvd::join(), 2);
  });
}

TEST(Horovod, CallsThatDifferAreNamedOnAllRanksAndTheNextIsGood) {
  on_ranks(2, [](int rank) {
    const std::string shapes = message_of([&] { hvd::allreduce(values(rank, {2 + rank})); });
    EXPECT_EQ(shapes,
              "the ranks' calls differ: rank 0 calls allreduce (Average) of Double [2], rank 1 allreduce (Average) of "
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
    expect_says(message_of([] { hvd::allreduce(at::ones({1}, at::kBool)); }), "bools are reduced by Min");
    expect_says(message_of([] { hvd::allgather(at::ones({1}, at::kComplexFloat)); }), "ComplexFloat");
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

TEST(Horovod, TheStateOfLbfgsIsRefusedByName) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(3, 1);
    torch::optim::LBFGS lbfgs(net->parameters());
    expect_says(message_of<InvalidArgument>([&] { hvd::broadcast_optimizer_state(lbfgs, 0); }), "torch::optim::LBFGS");
    expect_equal(hvd::allreduce(values(rank)), values(0) + 5);
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

}  // namespace
}  // namespace lockstep::horovod
