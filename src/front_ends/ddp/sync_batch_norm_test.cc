// When the layers that convert_sync_batchnorm changed wait for the other ranks; ranks are threads.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "collective/ranks_testing.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/ddp/sync_batch_norm.h"

namespace lockstep::ddp {
namespace {

using at::Tensor;

// PyTorch's SyncBatchNorm synchronizes only while it trains, and so does this one.
template <class BatchNorm>
void expect_own_statistics_in_eval(BatchNorm norm, const Group& group) {
  convert_sync_batchnorm(*norm, group);
  const auto x = at::arange(12, at::kFloat).view({4, 3}) * (group.rank() + 1);
  norm(x);
  norm->eval();
  if (group.rank() > 0) return;  // which would leave rank 0 waiting
  const auto expected = at::batch_norm(x, {}, {}, {}, {}, /*training=*/true, 0, 1e-5, false);
  EXPECT_LE((norm(x) - expected).abs().max().template item<float>(), 1e-6);
}

TEST(SyncBatchNorm, WithoutRunningStatisticsARankEvaluatesAlone) {
  collective::on_ranks(2, [](const Group& group) {
    const auto options = torch::nn::BatchNormOptions(3).track_running_stats(false);
    expect_own_statistics_in_eval(torch::nn::BatchNorm1d(options), group);
    expect_own_statistics_in_eval(SyncBatchNorm(options), group);
  });
}

TEST(SyncBatchNorm, RanksInAnotherLayerAreToldWhich) {
  const auto errors = collective::run_ranks({.group = {.backend = "threads"}}, [](const Group& group) {
    torch::nn::BatchNorm1d first(3), second(3);
    torch::nn::Sequential both;
    both->push_back("first", first);
    both->push_back("second", second);
    convert_sync_batchnorm(*both, group);
    (group.rank() == 0 ? first : second)(at::ones({2, 3}));
  });
  const auto said = message_of([&] { std::rethrow_exception(errors[0]); });
  expect_says(said, "the statistics of the batch normalization \"first\"");
  expect_says(said, "the statistics of the batch normalization \"second\"");
}

// Two forwards of unequal parts in one backward: a rank counts for the examples of both.
TEST(SyncBatchNorm, ABackwardThroughTwoForwardsIsThatOfOneProcess) {
  const std::vector<std::vector<std::int64_t>> examples{{2, 4}, {3, 1}};  // [rank][part]
  const auto part = [](int number) { return at::sin(at::arange(15 * 3, at::kDouble).view({15, 3}) * (0.7 + number)); };
  const auto loss = [](const Tensor& y) { return (y * at::arange(3, at::kDouble)).square().sum(); };
  const auto make = [] {
    SyncBatchNorm norm(3);
    norm->to(at::kDouble);
    return norm;
  };
  auto whole = make();
  (loss(whole(part(0).slice(0, 0, 5))) + loss(whole(part(1).slice(0, 0, 5)))).div(10).backward();
  collective::on_ranks(2, [&](const Group& group) {
    auto norm = make();
    convert_sync_batchnorm(*norm, group);
    DistributedDataParallel ddp(norm, group);
    const auto& mine = examples[static_cast<std::size_t>(group.rank())];
    Tensor sum = at::zeros({}, at::kDouble);
    for (int number : {0, 1}) {
      const auto begin = group.rank() == 0 ? 0 : examples[0][static_cast<std::size_t>(number)];
      sum = sum + loss(ddp(part(number).slice(0, begin, begin + mine[static_cast<std::size_t>(number)])));
    }
    sum.div(static_cast<double>(mine[0] + mine[1])).backward();
    EXPECT_LE((norm->weight.grad() - whole->weight.grad()).abs().max().item<double>(), 1e-12);
  });
}

TEST(SyncBatchNorm, RanksAreToldThatAnotherDoesNotKnowItsExamples) {
  const auto errors = collective::run_ranks({.group = {.backend = "threads"}}, [](const Group& group) {
    torch::nn::Sequential net(torch::nn::Linear(3, 3), SyncBatchNorm(torch::nn::BatchNormOptions(3).affine(false)));
    convert_sync_batchnorm(*net, group);
    DistributedDataParallel ddp(net, group);
    const auto x = at::sin(at::arange(12).view({4, 3}));
    (group.rank() == 0 ? ddp(x) : net->forward(x)).square().sum().backward();
  });
  const auto said = [&](std::size_t rank) { return message_of([&] { std::rethrow_exception(errors[rank]); }); };
  expect_says(said(0), "another rank does not know the number of its examples");
  expect_says(said(1), "no forward that was called through ddp is in the graph of this backward");
}

// An adversarial example is made so: between a forward and its backward.
TEST(SyncBatchNorm, ABackwardForAnInputAloneIsNoneOfDistributedDataParallel) {
  collective::on_ranks(2, [&](const Group& group) {
    const auto x = at::sin(at::arange(15, at::kDouble).view({5, 3}) * 0.7);
    const auto part = group.rank() == 0 ? x.slice(0, 0, 4) : x.slice(0, 4);
    const auto gradient = [&](bool asks) {
      SyncBatchNorm norm(3);
      norm->to(at::kDouble);
      convert_sync_batchnorm(*norm, group);
      DistributedDataParallel ddp(norm, group);
      const auto first = ddp(part).pow(3).sum(), second = ddp(part * 2).pow(4).sum();
      if (asks) {
        const auto input = part.clone().requires_grad_();
        torch::autograd::grad({ddp->forward(input).pow(3).sum()}, {input});
      }
      (first + second).div(2.0 * static_cast<double>(part.size(0))).backward();
      return norm->weight.grad().clone();
    };
    EXPECT_LE((gradient(true) - gradient(false)).abs().max().item<double>(), 1e-12);
  });
}

TEST(SyncBatchNorm, StatisticsOf16BitsAreRoundedOnce) {
  const auto batches = (at::sin(at::arange(5 * 12 * 8, at::kDouble) * 1.7).view({5, 12, 8}) * 2).to(at::kBFloat16);
  auto expected = at::ones({8}, at::kBFloat16);
  for (const auto& batch : batches.unbind()) {
    expected =
        (expected.to(at::kDouble) * 0.9 + batch.to(at::kDouble).var(0, /*unbiased=*/true) * 0.1).to(at::kBFloat16);
  }
  collective::on_ranks(2, [&](const Group& group) {
    SyncBatchNorm norm(8);
    norm->to(at::kBFloat16);
    convert_sync_batchnorm(*norm, group);
    for (const auto& batch : batches.unbind()) norm(group.rank() == 0 ? batch.slice(0, 0, 7) : batch.slice(0, 7));
    EXPECT_TRUE(at::equal(norm->running_var, expected)) << norm->running_var << expected;
  });
}

}  // namespace
}  // namespace lockstep::ddp
