// The gradients of operations: the numbers that Horovod's own tests (test_torch.py, test_horovod_*_grad) expect.
#include <torch/csrc/autograd/autograd.h>

#include "base/expect_says_testing.h"
#include "front_ends/horovod/ranks_testing.h"

namespace lockstep::horovod {
namespace {

namespace hvd = horovod;
using at::Tensor;
using hvd::expect_equal;
using hvd::on_ranks;
using hvd::values;

constexpr int kRanks = 3;

// Returns the gradient of `input` for the result's `gradient`.
Tensor gradient_of(const Tensor& input, const std::function<Tensor(const Tensor&)>& operation, const Tensor& gradient) {
  const auto leaf = input.detach().clone().requires_grad_();
  const auto result = operation(leaf);
  EXPECT_TRUE(result.requires_grad());
  result.backward(gradient);
  return leaf.grad();
}

TEST(Differentiable, Allreduce) {
  on_ranks(kRanks, [](int rank) {
    const auto ones = at::ones({2, 3}, at::kDouble);
    const auto by = [](const hvd::ReduceOptions& options) {
      return [options](const Tensor& x) { return hvd::allreduce(x, options); };
    };
    expect_equal(gradient_of(values(rank), by({.op = hvd::Sum}), ones), ones * kRanks);
    expect_equal(gradient_of(values(rank), by({}), ones), ones);
    expect_equal(gradient_of(values(rank), by({.op = hvd::Sum, .name = "mine"}), ones * rank), ones * 3);
    expect_equal(gradient_of(values(rank), by({.op = hvd::Sum, .prescale_factor = 2, .postscale_factor = 0.25}), ones),
                 ones * kRanks * 0.5);
    expect_equal(gradient_of(values(rank), by({.compression = hvd::Compression::fp16}), ones), ones);
    expect_says(message_of<InvalidArgument>([&] { gradient_of(values(rank), by({.op = hvd::Max}), ones); }),
                "allreduce by Max has no gradient");
  });
}

// The operations are of equal sizes, and the ranks differentiate them in another order.
TEST(Differentiable, BackwardsOfOperationsWithNamesAreToldApart) {
  on_ranks(2, [](int rank) {
    const auto x = values(rank).requires_grad_();
    const auto both = [&](const auto& operation) {
      const Tensor first = operation("first"), second = operation("second");
      const auto said = message_of<InvalidArgument>([&] { (rank == 0 ? first : second).sum().backward(); });
      expect_says(said, "\"backward of first\"");
      expect_says(said, "\"backward of second\"");
    };
    both([&](const std::string& name) { return hvd::allreduce(x, {.name = name}); });
    both([&](const std::string& name) { return hvd::allgather(x, name); });
    both([&](const std::string& name) { return hvd::broadcast(x, 0, name); });
    both([&](const std::string& name) { return hvd::alltoall(x, {}, name).output; });
    both([&](const std::string& name) { return hvd::reducescatter(x, {.name = name}); });
    hvd::allreduce(x, {.name = "both"}).sum().backward();
  });
}

TEST(Differentiable, GroupedAllreduceWithAnUnusedResult) {
  on_ranks(kRanks, [](int rank) {
    const auto a = values(rank).requires_grad_(), b = values(rank, {4}).requires_grad_(), c = values(rank, {2});
    const auto sums = hvd::grouped_allreduce({a, b, c}, {.op = hvd::Sum});
    sums[0].sum().backward();
    expect_equal(a.grad(), at::full({2, 3}, kRanks, at::kDouble));
    expect_equal(b.grad(), at::zeros({4}, at::kDouble));
    EXPECT_FALSE(c.requires_grad());
    auto changed = hvd::allreduce(a);
    changed.add_(1);  // a result belongs to its user
  });
}

TEST(Differentiable, AllgatherOfUnequalRows) {
  on_ranks(kRanks, [](int rank) {
    // Each rank's rows get their own number as gradient.
    const auto gradient =
        at::cat({at::full({1, 2}, 0.0), at::full({2, 2}, 1.0), at::full({3, 2}, 2.0)}).to(at::kDouble);
    const auto own = at::full({rank + 1, 2}, rank, at::kDouble);
    const auto gather = [](const Tensor& x) { return hvd::allgather(x, "rows"); };
    expect_equal(gradient_of(values(rank, {rank + 1, 2}), gather, gradient), own);
    const auto second = [rank](const Tensor& x) { return hvd::grouped_allgather({values(rank, {2}), x})[1]; };
    expect_equal(gradient_of(values(rank, {rank + 1, 2}), second, gradient * (rank + 1)), own * 2);  // mean of 1, 2, 3
  });
}

TEST(Differentiable, BroadcastGivesToItsRoot) {
  on_ranks(kRanks, [](int rank) {
    const auto ones = at::ones({2, 3}, at::kDouble);
    for (int root = 0; root < kRanks; ++root) {
      const auto operation = [root](const Tensor& x) { return hvd::broadcast(x, root); };
      expect_equal(gradient_of(values(rank), operation, ones * rank), ones * (rank == root ? 1 : 0));
    }
  });
}

TEST(Differentiable, AlltoallSendsBack) {
  on_ranks(kRanks, [](int rank) {
    const std::vector<std::int64_t> splits{rank, 1, 2};
    const auto operation = [&](const Tensor& x) { return hvd::alltoall(x, splits).output; };
    // Rank r gives r to all that it received: the rows that were sent to it come back with it.
    const auto rows = std::array{0 + 1 + 2, 3, 6}[static_cast<std::size_t>(rank)];
    const auto gradient = gradient_of(values(rank, {rank + 3, 2}), operation, at::full({rows, 2}, rank, at::kDouble));
    expect_equal(gradient,
                 at::cat({at::full({rank, 2}, 0.0), at::full({1, 2}, 1.0), at::full({2, 2}, 2.0)}).to(at::kDouble));
  });
}

TEST(Differentiable, ReducescatterGathers) {
  on_ranks(kRanks, [](int rank) {
    const auto own = at::full({rank == 0 ? 2 : 1, 2}, rank + 1, at::kDouble);
    const auto all = at::cat({at::full({2, 2}, 1.0), at::full({1, 2}, 2.0), at::full({1, 2}, 3.0)}).to(at::kDouble);
    const auto by = [](const hvd::ReduceOptions& options) {
      return [options](const Tensor& x) { return hvd::reducescatter(x, options); };
    };
    expect_equal(gradient_of(values(rank, {4, 2}), by({}), own), all);
    expect_equal(gradient_of(values(rank, {4, 2}), by({.op = hvd::Sum}), own), all * kRanks);
    expect_equal(gradient_of(values(rank, {4, 2}), by({.prescale_factor = 2, .postscale_factor = 3}), own), all * 6);
    const auto grouped = [](const Tensor& x) { return hvd::grouped_reducescatter({x.detach(), x})[1]; };
    expect_equal(gradient_of(values(rank, {4, 2}), grouped, own), all);
  });
}

// For x^2 summed over ranks, a second derivative goes through an operation.
TEST(Differentiable, Twice) {
  on_ranks(kRanks, [](int rank) {
    const auto x = values(rank).requires_grad_();
    const auto sum = hvd::allreduce(x.square(), {.op = hvd::Sum}).sum();
    const auto first = torch::autograd::grad({sum}, {x}, {}, true, true)[0];
    expect_equal(first.detach(), values(rank) * 2 * kRanks);
    first.sum().backward();
    expect_equal(x.grad(), at::full({2, 3}, 2.0 * kRanks, at::kDouble));
  });
}

TEST(Differentiable, TwiceThroughWhatOneRankGives) {
  on_ranks(kRanks, [](int rank) {
    const auto x = values(rank).requires_grad_();
    const auto of_root = hvd::broadcast(x, 1), own_rows = hvd::reducescatter(hvd::allgather(x), {.op = hvd::Sum});
    const auto sent = hvd::alltoall(hvd::allgather(x)).output;
    const auto sum = of_root.square().sum() + own_rows.square().sum() + sent.square().sum();
    const auto first = torch::autograd::grad({sum}, {x}, {}, true, true)[0];
    EXPECT_TRUE(first.requires_grad());  // on every rank: all take part in the second backward
    first.sum().backward();
    EXPECT_TRUE(x.grad().isfinite().all().item<bool>());
    EXPECT_GT(x.grad().abs().sum().item<double>(), 0);
  });
}

TEST(Differentiable, IntegersAndBoolsAmongGroupedTensorsHaveNoGradient) {
  on_ranks(kRanks, [](int rank) {
    const auto x = values(rank).requires_grad_();
    const auto mask = at::ones({2}, at::kBool), labels = values(rank, {2}, at::kLong);
    const auto gathered = hvd::grouped_allgather({mask, x, labels});
    EXPECT_FALSE(gathered[0].requires_grad() || gathered[2].requires_grad());
    gathered[1].sum().backward();
    expect_equal(x.grad(), at::ones({2, 3}, at::kDouble));
    hvd::grouped_allreduce({labels, x}, {.op = hvd::Sum})[1].sum().backward();
    expect_equal(x.grad(), at::full({2, 3}, 1.0 + kRanks, at::kDouble));
  });
}

TEST(Differentiable, NothingIsRecordedWithoutNeed) {
  on_ranks(2, [](int rank) {
    EXPECT_FALSE(hvd::allreduce(values(rank)).requires_grad());
    auto sum = hvd::allreduce(values(rank));
    sum.mul_(at::ones({}, at::kDouble).requires_grad_());  // a tensor of its user's, like any other
    EXPECT_TRUE(sum.requires_grad());
    const auto x = values(rank).requires_grad_();
    EXPECT_FALSE(hvd::allreduce_async(x).wait().requires_grad());
    const at::NoGradGuard no_gradient;
    EXPECT_FALSE(hvd::allreduce(x).requires_grad());
  });
}

// int8, int16 and bool, which are never averaged in Horovod, travel as they are.
TEST(Differentiable, SmallIntegersAndBools) {
  on_ranks(kRanks, [](int rank) {
    for (const auto dtype : {at::kChar, at::kShort, at::kBool}) {
      const auto mine = (values(rank) - 2).to(dtype);
      expect_equal(hvd::allgather(mine), at::cat({(values(0) - 2), (values(1) - 2), (values(2) - 2)}).to(dtype));
      expect_equal(hvd::broadcast(mine, 1), (values(1) - 2).to(dtype));
      expect_equal(hvd::alltoall(mine.expand({3, 2, 3}).contiguous()).output.select(0, 2), (values(2) - 2).to(dtype));
    }
    const auto only = at::arange(kRanks, at::kLong).eq(rank);
    expect_equal(hvd::allreduce(only, {.op = hvd::Max}), at::ones({kRanks}, at::kBool));
    expect_equal(hvd::allreduce(only, {.op = hvd::Min}), at::zeros({kRanks}, at::kBool));
  });
}

}  // namespace
}  // namespace lockstep::horovod
