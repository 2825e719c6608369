// A Group's operations on tensors of any memory format; ranks are threads.
#include "lockstep/gradient/tensor_collectives.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/expect_says_testing.h"

namespace lockstep::gradient {
namespace {

constexpr int kRanks = 3;

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

template <class Body>
void on_ranks(const Body& body) {
  const auto groups = make_thread_groups(kRanks);
  std::vector<std::jthread> threads;
  for (const auto& group : groups) {
    threads.emplace_back([&body, &group] {
      try {
        body(group, group.rank());
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
        group.abort(error.what());
      }
    });
  }
}

Tensor values(int rank, at::IntArrayRef sizes = {6, 2}, at::ScalarType dtype = at::kDouble) {
  return (at::arange(c10::multiply_integers(sizes), at::kDouble).reshape(sizes) + 20 * rank).to(dtype);
}

void expect_equal(const Tensor& a, const Tensor& b) { EXPECT_TRUE(at::equal(a, b)) << a << "\nand\n" << b; }

TEST(TensorCollectives, OfEveryMemoryFormat) {
  on_ranks([](const Group& group, int rank) {
    const auto sum = values(0) + values(1) + values(2);
    const auto whole = values(rank), transposed = values(rank).t(), strided = values(rank, {6, 4}).slice(1, 0, 4, 2);
    const auto leaf = values(rank).requires_grad_();
    all_reduce(group, whole, ReduceOp::sum, soon());
    expect_equal(whole, sum);
    all_reduce(group, transposed, ReduceOp::sum, soon());
    expect_equal(transposed, sum.t());
    all_reduce(group, leaf, ReduceOp::mean, soon());
    expect_equal(leaf.detach(), sum / 3);
    EXPECT_TRUE(leaf.requires_grad() && leaf.is_leaf());
    broadcast(group, strided, 1, soon());
    expect_equal(strided, values(1, {6, 4}).slice(1, 0, 4, 2));

    expect_equal(all_gather(group, values(rank).t(), soon(), 1), at::cat({values(0), values(1), values(2)}).t());
    expect_equal(all_gather(group, values(rank, {rank, 2}), soon()), at::cat({values(1, {1, 2}), values(2, {2, 2})}));
    expect_equal(reduce_scatter(group, values(rank), ReduceOp::sum, soon()), sum.slice(0, 2 * rank, 2 * rank + 2));
    const auto exchanged = all_to_all(group, values(rank), soon());
    for (int from = 0; from < kRanks; ++from) {
      expect_equal(exchanged.slice(0, 2 * from, 2 * from + 2), values(from).slice(0, 2 * rank, 2 * rank + 2));
    }
    const auto scalar = at::scalar_tensor(rank, at::kDouble), empty = at::empty({0, 3});
    all_reduce(group, scalar, ReduceOp::sum, soon());
    EXPECT_EQ(scalar.item<double>(), 3);
    all_reduce(group, empty, ReduceOp::sum, soon());
    EXPECT_EQ(all_gather(group, empty, soon()).sizes(), empty.sizes());

    const auto message = rank == 0 ? values(0).t() : at::zeros({6, 2}, at::kDouble).t();
    if (rank == 0) send(group, message, 1, soon());
    if (rank == 1) recv(group, message, 0, soon());
    if (rank == 1) expect_equal(message, values(0).t());
  });
}

TEST(TensorCollectives, OfEveryDtype) {
  on_ranks([](const Group& group, int rank) {
    for (const auto dtype :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte, at::kChar, at::kShort}) {
      const auto mine = values(rank, {3}, dtype);
      all_reduce(group, mine, ReduceOp::max, soon());
      expect_equal(mine, values(2, {3}, dtype));
    }
    const auto flag = at::full({2}, rank == 1, at::kBool);
    all_reduce(group, flag, ReduceOp::max, soon());
    expect_equal(flag, at::ones({2}, at::kBool));
  });
}

TEST(TensorCollectives, BadTensorsAreNamed) {
  const auto group = make_thread_groups(1)[0];
  const auto says = [](const auto& act, const std::string& part) {
    expect_says(message_of<InvalidArgument>(act), part);
  };
  says([&] { buffer_of(values(0).t()); }, "it must be contiguous and on the CPU");
  says([&] { buffer_of(Tensor()); }, "the tensor is undefined");
  says([&] { all_reduce(group, values(0).to_sparse(), ReduceOp::sum, soon()); }, "all_reduce: the tensor is sparse");
  says([&] { all_reduce(group, at::ones({1}, at::kComplexFloat), ReduceOp::sum, soon()); }, "ComplexFloat");
  says([&] { all_gather(group, at::ones({}), soon()); }, "the tensor is a scalar");
  says([&] { all_gather(group, at::ones({2, 2}), soon(), 2); }, "dim is 2; the tensor has the dimensions -2 to 1");
  says([&] { broadcast(group, at::zeros({1}).expand({4}), 0, soon()); }, "elements share memory");
  const auto three = make_thread_groups(3)[0];
  says([&] { reduce_scatter(three, at::ones({4}), ReduceOp::sum, soon()); }, "a multiple of the number of ranks, 3");
  says([&] { all_to_all(three, at::ones({}), soon()); }, "a multiple of the number of ranks, 3");
}

// Tensors with as many elements are not the same tensor.
TEST(TensorCollectives, TensorsOfOtherShapesAreRefused) {
  const auto groups = make_thread_groups(2);
  std::vector<std::string> said(2);
  const auto refused = [&](const char* what, const std::function<void(const Group&, const Tensor&)>& call) {
    SCOPED_TRACE(what);
    std::vector<std::jthread> threads;
    for (const auto& group : groups) {
      threads.emplace_back([&] {
        const auto tensor = group.rank() == 0 ? values(0, {2, 6}) : values(1, {2, 3, 2});
        said[static_cast<std::size_t>(group.rank())] = message_of([&] { call(group, tensor); });
      });
    }
    threads.clear();
    for (const auto& each : said) {
      expect_says(each, "the ranks' calls differ");
      expect_says(each, "6]");
      expect_says(each, "3, 2]");
    }
  };
  refused("all_reduce", [](const auto& group, const auto& x) { all_reduce(group, x, ReduceOp::sum, soon()); });
  refused("broadcast", [](const auto& group, const auto& x) { broadcast(group, x, 0, soon()); });
  refused("all_gather", [](const auto& group, const auto& x) { all_gather(group, x, soon()); });
  refused("reduce_scatter", [](const auto& group, const auto& x) { reduce_scatter(group, x, ReduceOp::sum, soon()); });
  refused("all_to_all", [](const auto& group, const auto& x) { all_to_all(group, x, soon()); });
}

}  // namespace
}  // namespace lockstep::gradient
