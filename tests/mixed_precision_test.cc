// mixed_bfloat16: products in bfloat16, everything that is kept in float32.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include "gradient/replicated_parameters.h"
#include "strategy/unwrap.h"

namespace lockstep {
namespace {

class MixedPrecision : public testing::Test {
 protected:
  void SetUp() override { at::manual_seed(1); }  // of the data
  void TearDown() override { set_global_policy("float32"); }

  static Sequential make(const char* policy) {
    set_random_seed(1);
    set_global_policy(policy);
    Sequential model({Conv2D(8, 3, {.activation = "relu"}), MaxPooling2D(), Flatten(),
                      Dense(32, {.activation = "relu"}), Dense(10)});
    model.compile({.optimizer = Adam(), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    model.build({1, 12, 12});
    return model;
  }
};

TEST_F(MixedPrecision, ComputesInBFloat16AndKeepsFloat32) {
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  auto full = make("float32"), mixed = make("mixed_bfloat16");
  set_global_policy("float32");  // a model keeps the policy that it was made under
  const auto data = Dataset::from_tensor_slices(at::rand({20, 1, 12, 12})).batch(20);
  const auto expected = full.predict(data), actual = mixed.predict(data);
  EXPECT_EQ(actual.scalar_type(), at::kFloat);
  EXPECT_FALSE(at::equal(actual, expected)) << "nothing was computed in bfloat16";
  EXPECT_TRUE(at::allclose(actual, expected, 0.05, 0.05));
  const auto& parameters = unwrap(mixed.module());
  for (std::size_t i = 0; i < parameters.slots().size(); ++i) {
    EXPECT_EQ(parameters.parameter(0, i).scalar_type(), at::kFloat);
  }
}

TEST_F(MixedPrecision, LearnsAsFloat32Does) {
  const MirroredStrategy strategy(2);
  const auto scope = strategy.scope();
  const auto x = at::rand({64, 1, 12, 12});
  const auto y = at::randint(10, {64}, at::kLong);
  const auto last_loss = [&](const char* policy) {
    auto model = make(policy);
    double loss = 0;
    for (int i = 0; i < 60; ++i) loss = model.train_on_batch({x, y})["loss"];
    return loss;
  };
  const double full = last_loss("float32"), mixed = last_loss("mixed_bfloat16");
  EXPECT_LT(full, 2.0);
  EXPECT_NEAR(mixed, full, 0.05 * full);
}

TEST_F(MixedPrecision, LeavesTheCallersSettingsAlone) {
  auto model = make("mixed_bfloat16");
  model.predict(Dataset::from_tensor_slices(at::rand({2, 1, 12, 12})).batch(2));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST_F(MixedPrecision, Float16IsForGpus) {
  set_global_policy("mixed_float16");
  EXPECT_EQ(global_policy(), "mixed_float16");
  Sequential model({Dense(3)});
  try {
    model.build({4});
    FAIL() << "float16 was accepted on a CPU";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("use mixed_bfloat16"), std::string::npos) << error.what();
  }
}

TEST_F(MixedPrecision, OtherNamesAreRefused) {
  EXPECT_THROW(set_global_policy("mixed_float8"), InvalidArgument);
  EXPECT_EQ(global_policy(), "float32");
}

}  // namespace
}  // namespace lockstep
