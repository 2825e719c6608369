// DistributedDataParallel against one process on the whole batch, in double precision; ranks are threads.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"
#include "collective/ranks_testing.h"
#include "front_ends/ddp/net_testing.h"
#include "lockstep/collective/group_wrappers.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/ddp/sync_batch_norm.h"

namespace lockstep::ddp {
namespace {

class Ranks : public testing::TestWithParam<int> {};

TEST_P(Ranks, FiftyStepsAreThoseOfOneProcessOnTheWholeBatch) {
  const int size = GetParam();
  const auto all = batches(50, size);
  const auto alone = make_net();
  torch::optim::Adam adam(alone->parameters(), torch::optim::AdamOptions(0.01));
  for (const auto& batch : all) {
    adam.zero_grad();
    loss_of(alone->forward(batch.x), batch.y).backward();
    adam.step();
  }
  collective::on_ranks(size, [&](const Group& group) {
    // Small buckets, so that there are several and their order is learned.
    DistributedDataParallel ddp(make_net(), group,
                                {.bucket_cap_mb = 5e-4, .first_bucket_mb = 2e-4, .timeout_seconds = 30});
    torch::optim::Adam mine(ddp->parameters(), torch::optim::AdamOptions(0.01));
    for (const auto& batch : all) {
      const auto part = part_of(batch, group.rank(), group.size());
      mine.zero_grad();
      loss_of(ddp(part.x), part.y).backward();
      EXPECT_FALSE(ddp->never.grad().defined());
      mine.step();
    }
    expect_equal(*alone, *ddp, 1e-9);
  });
}

TEST_P(Ranks, AccumulationReducesOnce) {
  const int size = GetParam();
  const auto all = batches(24, size);
  const auto alone = make_net();
  torch::optim::SGD sgd(alone->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (std::size_t i = 0; i < all.size(); i += 3) {  // the ragged third is left out
    sgd.zero_grad();
    loss_of(alone->forward(all[i].x), all[i].y).backward();
    loss_of(alone->forward(all[i + 1].x), all[i + 1].y).backward();
    sgd.step();
  }
  collective::on_ranks(size, [&](const Group& group) {
    DistributedDataParallel ddp(make_net(), group, {.timeout_seconds = 30});
    torch::optim::SGD mine(ddp->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    for (std::size_t i = 0; i < all.size(); i += 3) {
      mine.zero_grad(i % 2 == 0);  // gradients that are zeroed in place are views of buckets
      const auto first = part_of(all[i], group.rank(), group.size()),
                 second = part_of(all[i + 1], group.rank(), group.size());
      {
        const auto quiet = ddp.no_sync();
        loss_of(ddp(first.x), first.y).backward();
      }
      loss_of(ddp(second.x), second.y).backward();
      mine.step();
    }
    expect_equal(*alone, *ddp, 1e-9);
  });
}

TEST_P(Ranks, GradientsThatAreKeptAddUpWhetherUsedAgainOrNot) {
  const int size = GetParam();
  const auto first = batches(1, size)[0];
  auto second = batches(2, size)[1];
  second.x.select(1, 0).zero_();  // `extra` is used in the first pass only
  const auto whole = make_net();
  for (const auto& batch : {first, second}) loss_of(whole->forward(batch.x), batch.y).backward();
  ASSERT_TRUE(whole->extra.grad().defined());
  collective::on_ranks(size, [&](const Group& group) {
    const auto net = make_net();
    DistributedDataParallel ddp(net, group);
    for (const auto& batch : {first, second}) {
      const auto mine = part_of(batch, group.rank(), size);
      loss_of(ddp.forward(mine.x), mine.y).backward();
    }
    for (const auto& parameter : whole->named_parameters()) {
      const auto grad = net->named_parameters()[parameter.key()].grad();
      ASSERT_EQ(grad.defined(), parameter->grad().defined()) << parameter.key();
      if (!grad.defined()) continue;
      EXPECT_LE((grad - parameter->grad()).abs().max().item<double>(), 1e-12) << parameter.key();
    }
  });
}

TEST_P(Ranks, UnequalNumbersOfBatchesCountExamples) {
  const int size = GetParam();
  // Rank r has r + 2 batches of 4 examples; in step s those that have one make a batch together.
  const auto batch_of = [](int rank, int step) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * rank + step));
    return Batch{at::randn({4, 6}, generator, at::kDouble), at::randn({4, 3}, generator, at::kDouble)};
  };
  const auto alone = make_net();
  torch::optim::SGD sgd(alone->parameters(), torch::optim::SGDOptions(0.05));
  for (int step = 0; step < size + 1; ++step) {
    std::vector<Tensor> x, y;
    for (int rank = std::max(0, step - 1); rank < size; ++rank) {
      x.push_back(batch_of(rank, step).x);
      y.push_back(batch_of(rank, step).y);
    }
    sgd.zero_grad();
    loss_of(alone->forward(at::cat(x)), at::cat(y)).backward();
    sgd.step();
  }
  collective::on_ranks(size, [&](const Group& group) {
    DistributedDataParallel ddp(make_net(), group, {.timeout_seconds = 30});
    torch::optim::SGD mine(ddp->parameters(), torch::optim::SGDOptions(0.05));
    ddp.join([&] {
      for (int step = 0; step < group.rank() + 2; ++step) {
        const auto batch = batch_of(group.rank(), step);
        mine.zero_grad();
        loss_of(ddp(batch.x), batch.y).backward();
        mine.step();
      }
    });
    expect_equal(*alone, *ddp, 1e-9);
  });
}

TEST(Join, ARankWhoseOptimizerLagsIsWarned) {
  testing::internal::CaptureStderr();
  collective::on_ranks(2, [&](const Group& group) {
    DistributedDataParallel ddp(make_net(), group, {.timeout_seconds = 30});
    ddp.join([&] {
      for (int step = 0; step < group.rank() + 1; ++step) ddp(at::ones({4, 6}, at::kDouble)).sum().backward();
    });
  });
  expect_says(testing::internal::GetCapturedStderr(), "rank 0 made fewer steps than rank 1");
}

// Two models of equal sizes.
TEST(Join, RanksInAnotherModelAreToldWhich) {
  const auto errors = collective::run_ranks({.group = {.backend = "threads"}}, [](const Group& group) {
    DistributedDataParallel first(make_net(), group, {.timeout_seconds = 30});
    DistributedDataParallel second(make_net(), group, {.timeout_seconds = 30});
    auto& mine = group.rank() == 0 ? first : second;
    mine.join([] {});
  });
  for (const auto& error : errors) {
    ASSERT_NE(error, nullptr);
    const auto said = message_of<InvalidArgument>([&] { std::rethrow_exception(error); });
    expect_says(said, "of DistributedDataParallel 1, rank 1 calls");
    expect_says(said, "of DistributedDataParallel 2");
  }
}

TEST_P(Ranks, BuffersAreRankZeros) {
  collective::on_ranks(GetParam(), [&](const Group& group) {
    DistributedDataParallel ddp(make_net(true), group, {.timeout_seconds = 30});
    for (const auto& batch : batches(2, group.size())) {
      const auto part = part_of(batch, group.rank(), group.size());
      loss_of(ddp(part.x), part.y).backward();
      auto first = ddp->norm->running_mean.clone();
      group.broadcast({first.data_ptr(), static_cast<std::size_t>(first.numel()), DType::float64}, 0,
                      Deadline::after(std::chrono::seconds(30)));
      EXPECT_TRUE(first.equal(ddp->norm->running_mean));
    }
  });
}

TEST_P(Ranks, SyncBatchNormIsBatchNormOfTheWholeBatch) {
  const int size = GetParam();
  const auto all = batches(9, 2 * size);  // two examples a rank and more
  const auto alone = make_net(true);
  torch::optim::SGD sgd(alone->parameters(), torch::optim::SGDOptions(0.05));
  for (const auto& batch : all) {
    sgd.zero_grad();
    loss_of(alone->forward(batch.x), batch.y).backward();
    sgd.step();
  }
  collective::on_ranks(size, [&](const Group& group) {
    const auto net = make_net(true);
    convert_sync_batchnorm(*net, group);
    DistributedDataParallel ddp(net, group, {.timeout_seconds = 30});
    torch::optim::SGD mine(ddp->parameters(), torch::optim::SGDOptions(0.05));
    for (const auto& batch : all) {
      const auto part = part_of(batch, group.rank(), group.size());
      mine.zero_grad();
      loss_of(ddp(part.x), part.y).backward();
      mine.step();
    }
    expect_equal(*alone, *ddp, 1e-9);
    EXPECT_LE((alone->norm->running_var - ddp->norm->running_var).abs().max().item<double>(), 1e-12);
    EXPECT_LE((alone->norm->running_mean - ddp->norm->running_mean).abs().max().item<double>(), 1e-12);
  });
}

// torch's BatchNorm refuses a part of one example; all ranks together have more.
TEST_P(Ranks, SyncBatchNormTakesOneValueAChannelOnARank) {
  const int size = GetParam();
  const auto x = at::randn({2 * size - 1, 4}, at::kDouble), weights = at::rand({2 * size - 1, 4}, at::kDouble);
  if (size == 1) {
    SyncBatchNorm alone(4);
    expect_says(message_of<InvalidArgument>([&] { alone(x); }), "one value per channel");
    return;
  }
  torch::nn::BatchNorm1d whole(torch::nn::BatchNormOptions(4).momentum(std::nullopt));
  whole->to(at::kDouble);
  const auto all = x.clone().requires_grad_();
  const auto expected = whole(all);
  (expected * weights).sum().backward();
  collective::on_ranks(size, [&](const Group& group) {
    const auto begin = std::max(0, 2 * group.rank() - 1), end = 2 * group.rank() + 1;  // rank 0 has one
    SyncBatchNorm norm(torch::nn::BatchNormOptions(4).momentum(std::nullopt));
    norm->to(at::kDouble);
    convert_sync_batchnorm(*norm, group);
    const auto mine = x.slice(0, begin, end).clone().requires_grad_();
    const auto y = norm(mine);
    // Each rank's loss is a mean over its own examples, and counts for as many.
    ((y * weights.slice(0, begin, end)).sum() / (end - begin)).backward();
    EXPECT_LE((y - expected.slice(0, begin, end)).abs().max().item<double>(), 1e-12);
    EXPECT_LE((mine.grad() * (end - begin) - all.grad().slice(0, begin, end)).abs().max().item<double>(), 1e-12);
    EXPECT_LE((norm->running_var - whole->running_var).abs().max().item<double>(), 1e-12);
    norm->eval();
    EXPECT_LE((norm(mine) - at::batch_norm(mine, norm->weight, norm->bias, norm->running_mean, norm->running_var, false,
                                           0, 1e-5, false))
                  .abs()
                  .max()
                  .item<double>(),
              1e-12);
  });
}

INSTANTIATE_TEST_SUITE_P(Ddp, Ranks, testing::Values(1, 2, 3, 5));

TEST(Ddp, RanksStartWithRankZerosValuesAndDifferentModulesAreNamed) {
  collective::on_ranks(2, [&](const Group& group) {
    auto net = make_net();
    if (group.rank() == 1) {
      const at::NoGradGuard no_gradient;
      net->first->weight.fill_(3);
    }
    DistributedDataParallel ddp(net, group);
    EXPECT_NE(ddp->first->weight.max().item<double>(), 3);

    auto other = std::make_shared<torch::nn::LinearImpl>(4, group.rank() == 0 ? 2 : 3);
    try {
      DistributedDataParallel bad(other, group);
      ADD_FAILURE() << "modules of different shapes were taken";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("\"weight\""), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace lockstep::ddp
