// LossScaleOptimizer: a scale that is a power of two changes no bit, gradients that are not finite change nothing.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <limits>

namespace lockstep {
namespace {

using torch::nn::Linear;

class LossScaling : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { at::manual_seed(1); }

  // A model y = Wx + b of a custom loop.
  struct Loop {
    explicit Loop(int replicas, const Optimizer& choice)
        : strategy(replicas), net(same_start(strategy)), optimizer(strategy.optimizer(choice, net)) {}

    static Mirrored<Linear> same_start(const Strategy& strategy) {
      set_random_seed(5);
      return strategy.replicate([] { return Linear(6, 3); });
    }
    void step(const Tensor& x) {
      const auto batch = *strategy.distribute(Dataset::from_tensor_slices(x).batch(x.size(0))).iterate().next();
      strategy.run(
          [&](ReplicaContext& replica, Linear& own, const Example& part) {
            optimizer.minimize(replica, own(part.x).pow(2).sum(), static_cast<double>(part.size()));
          },
          net, batch);
    }

    MirroredStrategy strategy;
    Mirrored<Linear> net;
    ReplicatedOptimizer optimizer;
  };
};

TEST_P(LossScaling, APowerOfTwoChangesNoBit) {
  const std::vector<Optimizer> optimizers{SGD({.momentum = 0.9}), Adam(), Adam({.clipnorm = 0.01}),
                                          AdamW({.clipvalue = 0.01}), RMSprop({.global_clipnorm = 0.01})};
  for (const auto& inner : optimizers) {
    Loop plain(GetParam(), inner), scaled(GetParam(), LossScaleOptimizer(inner, {.dynamic_growth_steps = 3}));
    for (int i = 0; i < 10; ++i) {
      const auto x = at::randn({8, 6});
      plain.step(x);
      scaled.step(x);
    }
    EXPECT_EQ(scaled.optimizer.loss_scale(), 32768 * 8);  // doubled after 3, 6 and 9 steps
    EXPECT_EQ(plain.optimizer.loss_scale(), 1);
    EXPECT_TRUE(at::equal(plain.net[0]->weight, scaled.net[0]->weight)) << inner.rule().name();
  }
}

TEST_P(LossScaling, GradientsThatAreNotFiniteChangeNothingButTheScale) {
  Loop loop(GetParam(), LossScaleOptimizer(Adam(), {.initial_scale = 64}));
  loop.step(at::randn({8, 6}));
  const auto before = loop.net[0]->weight.detach().clone();
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    auto x = at::randn({8, 6});
    x[7][2] = bad;  // on the last replica only
    loop.step(x);
  }
  EXPECT_TRUE(at::equal(loop.net[0]->weight, before));
  EXPECT_EQ(loop.optimizer.iterations(), 1);
  EXPECT_EQ(loop.optimizer.loss_scale(), 16);
  loop.step(at::randn({8, 6}));
  EXPECT_FALSE(at::equal(loop.net[0]->weight, before));
  EXPECT_EQ(loop.optimizer.iterations(), 2);
}

TEST_P(LossScaling, RecoversFromManyBadSteps) {
  Loop loop(GetParam(), LossScaleOptimizer(SGD({.learning_rate = 0.1})));
  for (int i = 0; i < 200; ++i) loop.step(at::full({8, 6}, std::numeric_limits<float>::quiet_NaN()));
  EXPECT_EQ(loop.optimizer.loss_scale(), 1);
  const auto before = loop.net[0]->weight.detach().clone();
  loop.step(at::randn({8, 6}));
  EXPECT_TRUE(loop.net[0]->weight.isfinite().all().item<bool>());
  EXPECT_FALSE(at::equal(loop.net[0]->weight, before));
}

TEST_P(LossScaling, ModelsTrainWithIt) {
  const MirroredStrategy strategy(GetParam());
  const auto scope = strategy.scope();
  const auto x = at::randn({16, 6}), y = at::randint(3, {16}, at::kLong);
  const auto trained = [&](const Optimizer& optimizer) {
    set_random_seed(1);
    Sequential model({Dense(16, {.activation = "relu"}), Dense(3)});
    model.compile({.optimizer = optimizer, .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    for (int i = 0; i < 5; ++i) model.train_on_batch({x, y});
    return model.predict(Dataset::from_tensor_slices(x).batch(16));
  };
  EXPECT_TRUE(at::equal(trained(Adam()), trained(LossScaleOptimizer(Adam()))));
}

TEST_P(LossScaling, ACheckpointKeepsTheScale) {
  const auto folder = testing::TempDir() + "loss_scale_" + std::to_string(GetParam());
  const Optimizer choice = LossScaleOptimizer(SGD(), {.initial_scale = 8, .dynamic_growth_steps = 3});
  Loop saved(GetParam(), choice), restored(GetParam(), choice);
  for (int i = 0; i < 5; ++i) saved.step(at::randn({8, 6}));
  const auto path = Checkpoint({{"optimizer", saved.optimizer.trackable()}}).save(folder + "/ckpt");
  Checkpoint({{"optimizer", restored.optimizer.trackable()}}).restore(path);
  EXPECT_EQ(restored.optimizer.loss_scale(), 16);
  restored.step(at::randn({8, 6}));  // the third since it doubled
  EXPECT_EQ(restored.optimizer.loss_scale(), 32);
  std::filesystem::remove_all(folder);
}

INSTANTIATE_TEST_SUITE_P(Replicas, LossScaling, testing::Values(1, 2));

TEST(LossScaleOptimizer, BadSettingsAreNamed) {
  EXPECT_THROW(LossScaleOptimizer(SGD(), {.initial_scale = 0}), InvalidArgument);
  EXPECT_THROW(LossScaleOptimizer(SGD(), {.dynamic_growth_steps = 0}), InvalidArgument);
  const Optimizer scaled = LossScaleOptimizer(SGD());
  EXPECT_THROW(LossScaleOptimizer(scaled, {}), InvalidArgument);
}

}  // namespace
}  // namespace lockstep
