// Arguments that LibTorch refuses are refused while a step is traced, and named.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

#include "base/expect_says_testing.h"
#include "lockstep/base/error.h"
#include "tpu/lowerings_testing.h"
#include "tpu/step_trace.h"

namespace lockstep::tpu {
namespace {

struct Refused {
  const char* name;
  std::function<at::Tensor(const at::Tensor& x)> act;  // x: [4, 8, 6, 6]
};

at::Tensor index_of_zeros(const at::Tensor& x, at::IntArrayRef sizes) {
  return at::zeros(sizes, x.options().dtype(at::kLong));
}
at::Tensor one_column(const at::Tensor& x) { return x.flatten(1).slice(1, 0, 1) * 1; }

const std::vector<Refused>& refused() {
  static const std::vector<Refused> all{
      {"add_ of a larger one", [](const auto& x) { return one_column(x).add_(x.flatten(1)); }},
      {"mul_ of a larger one", [](const auto& x) { return one_column(x).mul_(x.flatten(1)); }},
      {"copy_ of a larger one", [](const auto& x) { return one_column(x).copy_(x.flatten(1)); }},
      {"add", [](const auto& x) { return x + x.slice(1, 0, 3); }},
      {"cat",
       [](const auto& x) {
         return at::cat({x, x.select(0, 0)}, 0);
       }},
      {"expand",
       [](const auto& x) {
         return x.expand({4, 8});
       }},
      {"repeat", [](const auto& x) { return x.repeat({2}); }},
      {"slice by 0", [](const auto& x) { return x.slice(1, 0, 5, 0); }},
      {"permute",
       [](const auto& x) {
         return x.permute({0, 0, 1, 2});
       }},
      {"flip",
       [](const auto& x) {
         return x.flip({1, 1});
       }},
      {"view",
       [](const auto& x) {
         return x.view({-1, 5});
       }},
      {"narrow", [](const auto& x) { return x.narrow(1, 5, 9); }},
      {"select", [](const auto& x) { return x.select(1, -20); }},
      {"gather",
       [](const auto& x) {
         return x.flatten(1).gather(1, index_of_zeros(x, {7, 2}));
       }},
      {"scatter", [](const auto& x) { return x.scatter(1, index_of_zeros(x, {4}), 1.0); }},
      {"index_select by numbers", [](const auto& x) { return x.index_select(1, at::zeros({2}, x.options())); }},
      {"index_select by a matrix",
       [](const auto& x) {
         return x.index_select(1, index_of_zeros(x, {2, 2}));
       }},
      {"index_put",
       [](const auto& x) { return (x * 1).index_put_({index_of_zeros(x, {3})}, x.select(0, 0).slice(0, 0, 5)); }},
      {"amax of none", [](const auto& x) { return x.slice(1, 0, 0).amax(1); }},
      {"argmax", [](const auto& x) { return x.argmax(8); }},
      {"cumsum", [](const auto& x) { return x.cumsum(9); }},
      {"topk", [](const auto& x) { return std::get<0>(x.topk(50, 1)); }},
      {"mm of two dtypes", [](const auto& x) { return at::mm(x.flatten(1), x.flatten(1).t().to(at::kDouble)); }},
      {"linear", [](const auto& x) { return at::linear(x.flatten(1), x.flatten(1).slice(1, 0, 100)); }},
      {"bmm", [](const auto& x) { return at::bmm(x.flatten(2), x.flatten(2)); }},
      {"mv", [](const auto& x) { return at::mv(x.flatten(1), x.flatten().slice(0, 0, 5)); }},
      {"dot", [](const auto& x) { return at::dot(x.flatten(), x.flatten().slice(0, 0, 5)); }},
      {"conv2d", [](const auto& x) { return at::conv2d(x, x.slice(1, 0, 5)); }},
      {"conv2d's bias", [](const auto& x) { return at::conv2d(x, x.slice(0, 0, 2), x.flatten().slice(0, 0, 1)); }},
      {"max_pool2d",
       [](const auto& x) {
         return at::max_pool2d(x, {2, 2}, {2, 2}, {2, 2});
       }},
      {"avg_pool2d",
       [](const auto& x) {
         return at::avg_pool2d(x, {9, 9});
       }},
      {"layer_norm", [](const auto& x) { return at::layer_norm(x, {7}); }},
      {"group_norm", [](const auto& x) { return at::group_norm(x, 3); }},
      {"batch_norm",
       [](const auto& x) { return at::batch_norm(x, x.flatten().slice(0, 0, 1), {}, {}, {}, true, 0.1, 1e-5, false); }},
      {"binary_cross_entropy",
       [](const auto& x) { return at::binary_cross_entropy(x.sigmoid(), x.slice(1, 0, 1).sigmoid()); }},
      {"binary_cross_entropy_with_logits",
       [](const auto& x) { return at::binary_cross_entropy_with_logits(x, x.slice(1, 0, 1).sigmoid()); }},
      {"cross_entropy of other labels",
       [](const auto& x) { return at::cross_entropy_loss(x.flatten(1), index_of_zeros(x, {5})); }},
      {"cross_entropy of numbers",
       [](const auto& x) { return at::cross_entropy_loss(x.flatten(1), at::zeros({4}, x.options())); }},
      {"cross_entropy of an image's labels",
       [](const auto& x) {
         return at::cross_entropy_loss(x, index_of_zeros(x, {4, 1, 6, 6}));
       }},
      {"cross_entropy of a smaller image's labels",
       [](const auto& x) {
         return at::cross_entropy_loss(x, index_of_zeros(x, {4, 1, 1}));
       }},
      {"cross_entropy's weights",
       [](const auto& x) {
         return at::cross_entropy_loss(x, index_of_zeros(x, {4, 6, 6}), x.flatten().slice(0, 0, 1));
       }},
      {"dot of matrices", [](const auto& x) { return at::dot(x.flatten(1), x.flatten(1)); }},
      {"where of other sizes", [](const auto& x) { return at::where(x.slice(1, 0, 3) > 0, x, x); }},
      {"logical_and of other sizes", [](const auto& x) { return at::logical_and(x, x.slice(1, 0, 3)); }},
      {"softmax of integers", [](const auto& x) { return index_of_zeros(x, {4}).softmax(0); }},
      {"where", [](const auto& x) { return at::where(x, x, x); }},
      {"masked_fill", [](const auto& x) { return x.masked_fill(x, 1.0); }},
      {"bitwise_and", [](const auto& x) { return at::bitwise_and(x, x); }},
      {"embedding", [](const auto& x) { return at::embedding(x.flatten(1), x.flatten()); }},
  };
  return all;
}

TEST(BadArguments, AreRefusedAsByLibTorch) {
  const auto x = at::randn({4, 8, 6, 6});
  for (const auto& [name, act] : refused()) {
    EXPECT_THROW(act(x), c10::Error) << name;
    TracedStep step(1, /*for_cpu=*/true, [](const at::Tensor&) { return nullptr; });
    const auto traced = step.add_inputs({x})[0];
    try {
      act(traced);
      ADD_FAILURE() << name << " is traced";
    } catch (const InvalidArgument&) {
    } catch (const c10::Error&) {  // of LibTorch, which makes others of the operator
    }
  }
}

TEST(BadArguments, AreNamedWithTheOperatorAndItsPlace) {
  Trace trace;
  const auto x = trace.argument({32, 300}, at::kFloat), w = trace.argument({4, 392}, at::kFloat);
  expect_says(
      message_of<InvalidArgument>([&] { at::linear(x.relu(), w); }),
      "(operator 3 of the step, after aten::t_copy): mat1 and mat2 shapes cannot be multiplied (32x300 and 392x4)");
}

TEST(BadArguments, ATensorThatIsChangedKeepsItsShape) {
  const std::vector<at::Tensor> like{at::zeros({4, 1}), at::zeros({4, 3})};
  TracedStep step(1, /*for_cpu=*/true, [](const at::Tensor&) { return nullptr; });
  const auto inputs = step.add_inputs(like);
  const auto message = message_of<InvalidArgument>([&] { inputs[0].add_(inputs[1]); });
  expect_says(message, "aten::add_ (operator 1 of the step): ");
  expect_says(message, "doesn't match the broadcast shape [4, 3]");
}

}  // namespace
}  // namespace lockstep::tpu
