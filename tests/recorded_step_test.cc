// jit_compile with a recorder that plays a step by computing it again. So it shows without a GPU when a step is
// recorded, what is played, and what happens where recording fails.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include "ops/traced_program.h"
#include "strategy/strategy_impl.h"

namespace lockstep {
namespace {

class Recorded : public testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(1);
    ops::work_recorder() = [this](c10::Device, const std::function<void()>& work) { return record(work); };
  }
  void TearDown() override { ops::work_recorder() = {}; }

  std::unique_ptr<ops::RecordedWork> record(const std::function<void()>& work) {
    class Again final : public ops::RecordedWork {
     public:
      Again(std::function<void()> work, int& plays) : work_(std::move(work)), plays_(plays) {}
      void replay() override {
        ++plays_;
        work_();
      }

     private:
      std::function<void()> work_;
      int& plays_;
    };
    ++recordings_;
    if (failing_) TORCH_CHECK(false, "operation not permitted when stream is capturing");
    return std::make_unique<Again>(work, plays_);
  }

  // Weights after one step for each batch; variables lie on "the device", which here is the CPU.
  static Tensor train(bool jit_compile, const std::vector<Example>& batches) {
    const Strategy strategy(std::make_shared<StrategyImpl>(strategy::StrategySettings{
        .devices = {"cpu:0"}, .threads_per_replica = 1, .placement = gradient::Placement::device}));
    const auto scope = strategy.scope();
    set_random_seed(3);
    Sequential model({Dense(8, {.activation = "relu"}), Dropout(0.5), Dense(3)});
    model.compile({.optimizer = Adam({.learning_rate = CosineDecay(0.1, 20)}),
                   .loss = SparseCategoricalCrossentropy({.from_logits = true}),
                   .metrics = {"accuracy"},
                   .jit_compile = jit_compile});
    for (const auto& batch : batches) model.train_on_batch(batch);
    EXPECT_EQ(model.iterations(), static_cast<std::int64_t>(batches.size()));
    return unwrap(model.module()).flat(0, at::kFloat).clone();
  }

  static Example batch(std::int64_t size) { return {at::randn({size, 6}), at::randint(3, {size}, at::kLong)}; }

  int recordings_ = 0, plays_ = 0;
  bool failing_ = false;
};

TEST_F(Recorded, PlaysBatchesOfOneShapeFromTheFourthOn) {
  std::vector<Example> batches;
  for (int i = 0; i < 10; ++i) batches.push_back(batch(16));
  batches.push_back(batch(5));  // the last of an epoch
  for (int i = 0; i < 4; ++i) batches.push_back(batch(16));
  const auto expected = train(false, batches);
  EXPECT_EQ(recordings_, 0);
  EXPECT_TRUE(at::equal(train(true, batches), expected));
  EXPECT_EQ(recordings_, 1);
  EXPECT_EQ(plays_, 11);
}

TEST_F(Recorded, ShapesThatChangeAreNotRecorded) {
  std::vector<Example> batches;
  for (int i = 0; i < 12; ++i) batches.push_back(batch(4 + i % 3));
  EXPECT_TRUE(at::equal(train(true, batches), train(false, batches)));
  EXPECT_EQ(recordings_, 0);
}

TEST_F(Recorded, ExamplesWithWeightsAreNotRecorded) {
  std::vector<Example> batches;
  for (int i = 0; i < 6; ++i) {
    batches.push_back(batch(8));
    batches.back().weight = at::rand({8});
  }
  EXPECT_TRUE(at::equal(train(true, batches), train(false, batches)));
  EXPECT_EQ(recordings_, 0);
}

TEST_F(Recorded, WhatCannotBeRecordedTrainsAsWithout) {
  failing_ = true;
  std::vector<Example> batches;
  for (int i = 0; i < 8; ++i) batches.push_back(batch(16));
  EXPECT_TRUE(at::equal(train(true, batches), train(false, batches)));
  EXPECT_EQ(recordings_, 1) << "it was tried again";
}

}  // namespace
}  // namespace lockstep
