// Process sets, Adasum and sparse allreduce, against plain loops.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "base/expect_says_testing.h"
#include "front_ends/horovod/ranks_testing.h"

namespace lockstep::horovod {
namespace {

namespace hvd = lockstep::horovod;

Tensor random_of(int rank, std::int64_t numel, at::ScalarType dtype = at::kDouble) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(rank + 1));
  return at::randn({numel}, generator, at::kDouble).to(dtype);
}

TEST(ProcessSets, OperationsAreThoseOfTheSetsRanks) {
  on_ranks(4, [](int rank) {
    const auto even = hvd::add_process_set({2, 0});
    const auto odd = hvd::add_process_set({1, 3});
    EXPECT_EQ(even.ranks(), (std::vector<int>{0, 2}));
    EXPECT_EQ(even.included(), rank % 2 == 0);
    const auto& mine = rank % 2 == 0 ? even : odd;
    const int other = (rank + 2) % 4, first = rank % 2, second = first + 2;
    EXPECT_EQ(mine.size(), 2);
    EXPECT_EQ(mine.rank(), rank / 2);
    for (int round = 0; round < 3 + rank % 2; ++round) {  // the sets need not make equally many calls
      expect_equal(hvd::allreduce(values(rank), {.op = hvd::Sum, .process_set = mine}), values(rank) + values(other));
      expect_equal(hvd::allgather(values(rank), "", mine), at::cat({values(first), values(second)}));
      expect_equal(hvd::broadcast(values(rank), second, "", mine), values(second));
      const auto exchanged = hvd::alltoall(values(rank), {}, "", mine).output;
      expect_equal(exchanged, at::stack({values(first)[rank / 2], values(second)[rank / 2]}));
      expect_equal(hvd::reducescatter(values(rank), {.op = hvd::Sum, .process_set = mine}),
                   (values(first) + values(second)).narrow(0, rank / 2, 1));
      EXPECT_EQ(hvd::broadcast_object(rank, first, "", mine).toInt(), first);
      EXPECT_EQ(hvd::allgather_object(rank, "", mine).back().toInt(), second);
    }
    hvd::barrier(mine);
    expect_equal(hvd::allreduce(values(rank)), values(0) + 15);  // of all ranks
    EXPECT_EQ(hvd::global_process_set.size(), 4);
    EXPECT_EQ(hvd::global_process_set.rank(), rank);
  });
}

TEST(ProcessSets, MayGoOutOfScope) {
  on_ranks(2, [](int rank) {
    for (int round = 0; round < 100; ++round) {
      const auto set = hvd::add_process_set({0, 1});
      expect_equal(hvd::allreduce(values(rank), {.op = hvd::Sum, .process_set = set}), values(0) + values(1));
    }
  });
}

TEST(ProcessSets, ThoseOfEarlierRanksAreRefused) {
  std::vector<ProcessSet> kept(2);
  on_ranks(2, [&](int rank) { kept[static_cast<std::size_t>(rank)] = hvd::add_process_set({0, 1}); });
  on_ranks(2, [&](int rank) {
    expect_says(message_of<InvalidArgument>(
                    [&] { hvd::allreduce(values(rank), {.process_set = kept[static_cast<std::size_t>(rank)]}); }),
                "made for ranks that are no more");
  });
}

TEST(ProcessSets, AreDifferentiable) {
  on_ranks(3, [](int rank) {
    const auto set = hvd::add_process_set({0, 2});
    if (!set.included()) return;
    const auto x = values(rank).requires_grad_();
    (hvd::allreduce(x, {.op = hvd::Sum, .process_set = set}) * (rank + 1.0)).sum().backward();
    expect_equal(x.grad(), at::full_like(x, 4.0));  // 1 and 3
  });
}

TEST(ProcessSets, OptimizersTrainTheirRanks) {
  on_ranks(4, [](int rank) {
    const auto mine = hvd::add_process_set({0, 1}), theirs = hvd::add_process_set({2, 3});
    const auto& set = rank < 2 ? mine : theirs;
    torch::nn::Linear net(3, 1);
    net->to(at::kDouble);
    hvd::broadcast_parameters(*net, rank < 2 ? 0 : 2, set);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    hvd::DistributedOptimizer optimizer(sgd, {.process_set = set});
    const auto before = net->weight.detach().clone();
    for (int step = 0; step <= rank / 2; ++step) {
      optimizer.zero_grad();
      (net->forward(at::ones({1, 3}, at::kDouble)) * (rank + 1.0)).sum().backward();
      optimizer.step();
    }
    const double mean = rank < 2 ? 1.5 : 3.5;
    EXPECT_TRUE(at::allclose(before - net->weight.detach(), at::full_like(before, 0.1 * mean * (rank / 2 + 1))));
  });
}

TEST(ProcessSets, BadOnesAreNamed) {
  on_ranks(3, [](int rank) {
    const auto says = [](const auto& act) { return message_of<InvalidArgument>(act); };
    expect_says(says([] { hvd::add_process_set({}); }), "number of ranks is 0");
    expect_says(says([] { hvd::add_process_set({0, 3}); }), "a rank is 3; it must be from 0 to 2");
    expect_says(says([] { hvd::add_process_set({1, 1}); }), "rank 1 is given twice");
    expect_says(says([rank] {
                  hvd::add_process_set({0, rank == 2 ? 2 : 1});
                }),
                "rank 0 calls add_process_set of ranks 0, 1, rank 2 add_process_set of ranks 0, 2");
    const auto set = hvd::add_process_set({0, 1});
    if (rank < 2) {
      expect_says(says([&] { hvd::broadcast(values(0), 2, "", set); }), "root_rank is 2; it must be one of");
      return;
    }
    EXPECT_FALSE(set.included());
    expect_says(says([&] { hvd::allreduce(values(0), {.process_set = set}); }),
                "this rank, 2, is not in the process set of ranks 0, 1");
    expect_says(says([&] { set.rank(); }), "is not in the process set");
  });
}

// The published formula, down a tree of pairs.
Tensor adasum_of(int first, int count, std::int64_t numel) {
  if (count == 1) return random_of(first, numel);
  const auto a = adasum_of(first, count / 2, numel), b = adasum_of(first + count / 2, count / 2, numel);
  const auto both = a.dot(b);
  return a * (1 - both / (2 * a.dot(a))) + b * (1 - both / (2 * b.dot(b)));
}

TEST(Adasum, IsThePublishedFormula) {
  for (const int ranks : {1, 2, 4, 8}) {
    std::vector<Tensor> results(static_cast<std::size_t>(ranks));
    on_ranks(ranks, [&](int rank) {
      const auto tensors = hvd::grouped_allreduce({random_of(rank, 17), random_of(rank, 5)}, {.op = hvd::Adasum});
      EXPECT_LT((tensors[0] - adasum_of(0, ranks, 17)).abs().max().item<double>(), 1e-12);
      EXPECT_LT((tensors[1] - adasum_of(0, ranks, 5)).abs().max().item<double>(), 1e-12);
      results[static_cast<std::size_t>(rank)] = tensors[0];
    });
    for (const auto& each : results) EXPECT_TRUE(at::equal(each, results[0]));
  }
}

TEST(Adasum, OfEqualTensorsIsTheirMeanAndOfOrthogonalOnesTheirSum) {
  on_ranks(2, [](int rank) {
    const auto equal = at::tensor({1.0, -2.0, 3.0});
    expect_equal(hvd::allreduce(equal, {.op = hvd::Adasum}), equal);
    const auto axis = rank == 0 ? at::tensor({5.0, 0.0}) : at::tensor({0.0, 7.0});
    expect_equal(hvd::allreduce(axis, {.op = hvd::Adasum}), at::tensor({5.0, 7.0}));
    expect_equal(hvd::allreduce(axis * rank, {.op = hvd::Adasum}), at::tensor({0.0, 7.0}));  // one is zero
    const auto half = hvd::allreduce(random_of(rank, 9, at::kBFloat16), {.op = hvd::Adasum});
    EXPECT_EQ(half.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::allclose(half.to(at::kDouble), adasum_of(0, 2, 9), 0.03, 0.03));
  });
}

TEST(Adasum, IsRefusedWhereThereIsNone) {
  on_ranks(3, [](int) {
    const auto says = [](const auto& act) { return message_of<InvalidArgument>(act); };
    expect_says(says([] { hvd::allreduce(values(0), {.op = hvd::Adasum}); }), "3, must be a power of two");
    expect_says(says([] { hvd::allreduce(values(0, {2}, at::kInt), {.op = hvd::Adasum}); }), "floating-point");
    expect_says(says([] { hvd::reducescatter(values(0), {.op = hvd::Adasum}); }), "Adasum is an op of allreduce");
  });
}

TEST(SparseAllreduce, IsTheSumOfDenseTensors) {
  on_ranks(3, [](int rank) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kInt}) {
      const auto dense = [&](int of) {  // rank 1 has no entry
        auto tensor = at::zeros({6, 2}, dtype);
        for (int row = of; row < 6 && of != 1; row += 2) tensor[row] = 10 * of + row;
        return tensor;
      };
      const auto sum = dense(0) + dense(1) + dense(2);
      const auto sparse = dense(rank).to_sparse(1);
      const auto result = hvd::sparse_allreduce(sparse, {.op = hvd::Sum});
      if (dtype == at::kInt)
        expect_says(message_of<InvalidArgument>([&] { hvd::sparse_allreduce(sparse); }), "average of integers");
      EXPECT_TRUE(result.is_sparse());
      expect_equal(result.to_dense(), sum);
      if (dtype == at::kInt) continue;
      EXPECT_TRUE(at::allclose(hvd::sparse_allreduce(sparse, {.postscale_factor = 6}).to_dense(), sum * 2));
      EXPECT_TRUE(at::allclose(
          hvd::sparse_allreduce(sparse, {.op = hvd::Sum, .compression = hvd::Compression::bf16}).to_dense(), sum,
          0.01));
    }
    const auto entries = at::sparse_coo_tensor(at::full({1, 2}, rank, at::kLong), at::ones({2}, at::kDouble), {4});
    expect_equal(hvd::sparse_allreduce_async(entries, {.op = hvd::Sum}).wait().to_dense(),
                 at::tensor({2.0, 2.0, 2.0, 0.0}));
    expect_says(message_of<InvalidArgument>([] { hvd::sparse_allreduce(values(0)); }), "must be sparse");
    expect_says(message_of<InvalidArgument>([&] { hvd::sparse_allreduce(entries, {.op = hvd::Max}); }), "op is Max");
    expect_says(message_of<InvalidArgument>([&] { hvd::allreduce(entries); }), "use sparse_allreduce");
  });
}

}  // namespace
}  // namespace lockstep::horovod
