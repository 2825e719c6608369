// When the layers that convert_sync_batchnorm changed wait for the other ranks; ranks are threads.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "collective/ranks_testing.h"
#include "lockstep/ddp/sync_batch_norm.h"

namespace lockstep::ddp {
namespace {

using at::Tensor;

// As PyTorch's SyncBatchNorm, which synchronizes while it trains alone.
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

}  // namespace
}  // namespace lockstep::ddp
