#include "gradient/eight_bit_mean.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "collective/on_ranks_testing.h"
#include "gradient/net_testing.h"

namespace lockstep::gradient {
namespace {

at::Tensor values_of(int rank, std::int64_t numel) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(rank + 1));
  return at::randn({numel}, generator) * at::logspace(-3, 2, numel);  // blocks of different sizes
}

at::Tensor mean_of(int ranks, std::int64_t numel) {
  auto sum = at::zeros({numel}, at::kDouble);
  for (int rank = 0; rank < ranks; ++rank) sum += values_of(rank, numel);
  return sum / ranks;
}

// The largest magnitude in each element's block of 256, over all ranks: what an error is measured by.
at::Tensor largest_of(int ranks, std::int64_t numel) {
  auto largest = at::zeros({numel}, at::kDouble);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto values = values_of(rank, numel);
    for (std::int64_t begin = 0; begin < numel; begin += 256) {
      const auto block = values.narrow(0, begin, std::min<std::int64_t>(256, numel - begin));
      auto into = largest.narrow(0, begin, block.numel());
      into.copy_(at::maximum(into, block.abs().max().to(at::kDouble).expand_as(into)));
    }
  }
  return largest;
}

void reduce(const EightBitMean& mean, const Group& group, const at::Tensor& values, bool gathers = true) {
  const auto act = [&](const Group::RunCalls& run) { mean.reduce(values, gathers, run); };
  group.start(act, {}, soon()).wait();
}

TEST(EightBitMean, IsTheMeanButForRoundingWithTheSameBitsOnAllRanks) {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    for (const std::int64_t numel : {1, 255, 256, 257, 1000, 5000}) {
      std::vector<at::Tensor> results(static_cast<std::size_t>(ranks));
      collective::on_ranks(ranks, [&](const Group& group) {
        const EightBitMean mean(group.rank(), numel, ranks, at::kCPU);
        auto& mine = results[static_cast<std::size_t>(group.rank())];
        mine = values_of(group.rank(), numel);
        reduce(mean, group, mine);
      });
      for (const auto& each : results) EXPECT_TRUE(at::equal(each, results[0]));
      // Half a step of the senders, and half a step of the owner.
      const auto errors = (results[0] - mean_of(ranks, numel)).abs() / largest_of(ranks, numel);
      EXPECT_LT(errors.max().item<double>(), 1.01 / 127) << ranks << " ranks, " << numel;
    }
  }
}

TEST(EightBitMean, IsRightInTheLongRun) {
  constexpr int kRanks = 3, kTimes = 200;
  constexpr std::int64_t kNumel = 700;
  collective::on_ranks(kRanks, [&](const Group& group) {
    const EightBitMean mean(group.rank(), kNumel, kRanks, at::kCPU);
    auto sum = at::zeros({kNumel}, at::kDouble);
    for (int i = 0; i < kTimes; ++i) {
      const auto values = values_of(group.rank(), kNumel);
      reduce(mean, group, values);
      sum += values;
    }
    const auto errors = (sum / kTimes - mean_of(kRanks, kNumel)).abs() / largest_of(kRanks, kNumel);
    EXPECT_LT(errors.max().item<double>(), 1.1 / 127 / kTimes);
  });
}

// A parameter that each second step uses, beside one with gradients that are much larger.
TEST(EightBitMean, IdleElementsKeepWhatTheyLost) {
  constexpr int kRanks = 2, kTimes = 400;
  constexpr std::int64_t kNumel = 300, kBegin = 100, kCount = 50;
  collective::on_ranks(kRanks, [&](const Group& group) {
    const EightBitMean mean(group.rank(), kNumel, kRanks, at::kCPU);
    double sum = 0;
    for (int i = 0; i < kTimes; ++i) {
      const auto values = at::full({kNumel}, 127.0F);
      const bool idle = i % 2 == 1;
      values.narrow(0, kBegin, kCount).fill_(idle ? 0 : 0.4F);
      const auto act = [&](const Group::RunCalls& run) {
        mean.reduce(
            values, true, run,
            idle ? std::vector<EightBitMean::Elements>{{kBegin, kCount}} : std::vector<EightBitMean::Elements>());
      };
      group.start(act, {}, soon()).wait();
      if (!idle) sum += values[kBegin + 3].item<double>();
    }
    EXPECT_NEAR(sum / (kTimes / 2), 0.4, 0.02);
  });
}

TEST(EightBitMean, ARankGetsItsOwnRangeAlone) {
  constexpr int kRanks = 3;
  constexpr std::int64_t kNumel = 1000;
  const Counts counts{300, 0, 700};
  collective::on_ranks(kRanks, [&](const Group& group) {
    const EightBitMean mean(group.rank(), counts, at::kCPU);
    const auto values = values_of(group.rank(), kNumel), before = values.clone();
    reduce(mean, group, values, /*gathers=*/false);
    const std::int64_t begin = group.rank() == 0 ? 0 : 300, count = static_cast<std::int64_t>(counts[group.rank()]);
    const auto allowed = values_of(0, kNumel).abs().max() / 100;
    for (std::int64_t i = 0; i < kNumel; ++i) {
      const bool is_own = i >= begin && i < begin + count;
      const auto expected = is_own ? mean_of(kRanks, kNumel)[i].item<double>() : before[i].item<double>();
      EXPECT_NEAR(values[i].item<double>(), expected, is_own ? allowed.item<double>() : 0);
    }
  });
}

TEST(EightBitMean, ValuesThatAreNotFiniteAreSeenOnceOnAllRanks) {
  constexpr int kRanks = 2;
  constexpr std::int64_t kNumel = 600;
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    collective::on_ranks(kRanks, [&](const Group& group) {
      const EightBitMean mean(group.rank(), kNumel, kRanks, at::kCPU);
      const auto values = values_of(group.rank(), kNumel);
      if (group.rank() == 1) values[3] = bad;
      reduce(mean, group, values);
      EXPECT_FALSE(at::isfinite(values).all().item<bool>());
      const auto next = values_of(group.rank(), kNumel);
      reduce(mean, group, next);
      EXPECT_TRUE(at::isfinite(next).all().item<bool>());
    });
  }
}

}  // namespace
}  // namespace lockstep::gradient
