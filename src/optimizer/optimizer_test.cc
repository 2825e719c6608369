#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/optimizer/optimizer.h"
#include "optimizer/flat_update.h"

namespace lockstep::optimizer {
namespace {

TEST(FlatUpdate, SumsUpdatesAndSpreadsAnyLength) {
  for (const std::size_t count : {1, 100, 2047, 2048, 2049, 10'000}) {
    std::vector<std::vector<double>> gradients(3, std::vector<double>(count));
    std::vector<std::vector<double>> copies(2, std::vector<double>(count));
    std::vector<double> momentum(count, 0.5);
    std::vector<double> expected(count);
    for (std::size_t i = 0; i < count; ++i) {
      copies[0][i] = copies[1][i] = std::sin(static_cast<double>(i));
      double sum = 0;
      for (std::size_t k = 0; k < 3; ++k) sum += gradients[k][i] = std::cos(static_cast<double>(i + k));
      const double mean = std::clamp(sum / 4, -0.3, 0.3);
      expected[i] = copies[0][i] * (1 - 0.1 * 0.2) + (0.9 * 0.5 - 0.1 * mean);
    }
    const SGD optimizer({.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.2, .clipvalue = 0.3});
    const std::vector<const double*> sources{gradients[0].data(), gradients[1].data(), gradients[2].data()};
    const std::vector<double*> targets{copies[0].data(), copies[1].data()};
    const std::vector<double*> state{momentum.data()};
    reduce_and_update<double>(optimizer, {1, 0.1}, {4, 0.3}, {sources, targets, state, count});
    for (std::size_t i = 0; i < count; ++i) ASSERT_NEAR(copies[0][i], expected[i], 1e-14);
    EXPECT_EQ(copies[0], copies[1]);
  }
}

TEST(Optimizer, BadSettingsAreNamed) {
  EXPECT_THROW(SGD({.momentum = 1.5}), InvalidArgument);
  EXPECT_THROW(Adam({.beta_1 = 1}), InvalidArgument);
  EXPECT_THROW(RMSprop({.rho = -0.1}), InvalidArgument);
  EXPECT_THROW(Adagrad({.epsilon = -1}), InvalidArgument);
  EXPECT_THROW(Adam({.weight_decay = -1}), InvalidArgument);
  EXPECT_THROW(Adam({.clipnorm = 0}), InvalidArgument);
  EXPECT_THROW(Adam({.learning_rate = NAN}), InvalidArgument);
  EXPECT_THROW(Optimizer(nullptr, {}), InvalidArgument);
}

TEST(Schedule, BadSettingsAreNamed) {
  EXPECT_THROW(ExponentialDecay(0.1, {.decay_steps = 0}), InvalidArgument);
  EXPECT_THROW(PiecewiseConstantDecay({3}, {1}), InvalidArgument);
  EXPECT_THROW(PiecewiseConstantDecay({3, 3}, {1, 2, 3}), InvalidArgument);
  EXPECT_THROW(CosineDecay(0.1, 0), InvalidArgument);
  EXPECT_THROW(WarmUp(0.1, 0), InvalidArgument);
}

TEST(Schedule, AFunctionIsASchedule) {
  const LearningRate rate([](std::int64_t iteration) { return 1.0 / static_cast<double>(iteration + 1); });
  EXPECT_EQ(rate.at(3), 0.25);
}

}  // namespace
}  // namespace lockstep::optimizer
