// The evaluator of a job with parameter servers.
#include <ATen/ATen.h>

#include <future>

#include "base/fresh_folder_testing.h"
#include "tests/server_job.h"

namespace lockstep {
namespace {

// The evaluator's results for the last checkpoint are the chief's for the values in the checkpoint.
TEST(Evaluator, FollowsCheckpointsWhileTrainingGoesOn) {
  struct Results : Callback {
    void on_test_begin() override { ++begun; }
    void on_test_end(const Logs& logs) override {
      seen.emplace_back(model().iterations(), logs);
      EXPECT_EQ(begun, seen.size());
      if (auto tell = std::exchange(on_first, {})) tell();
    }
    std::size_t begun = 0;
    std::function<void()> on_first;
    std::vector<std::pair<std::int64_t, Logs>> seen;
  };
  const auto folder = fresh_folder("parameter_servers", "evaluator");
  const auto data = make_data(at::kDouble, true).batch(7);  // once: threads share the random numbers
  std::vector<std::pair<std::int64_t, Logs>> followed;
  // The second epoch begins when the evaluator has seen the checkpoint of the first: it works while training goes on.
  std::promise<void> evaluated;
  const auto wait = [&, future = evaluated.get_future().share()](int epoch) {
    if (epoch != 1) return;
    EXPECT_EQ(future.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  };
  History history;
  expect_no_error(run_job({.servers = 2, .evaluator = true}, [&](const auto& strategy) {
    const auto scope = strategy.scope();
    auto model = make_model(at::kDouble, Adam({.learning_rate = 0.01}));
    const auto results = std::make_shared<Results>();
    if (strategy.task_type() == "evaluator") results->on_first = [&] { evaluated.set_value(); };
    const auto returned =
        model.fit(data, {.epochs = 20,
                         .verbose = 0,
                         .callbacks = {ModelCheckpoint((folder / "ckpt-{epoch}").string(), {.max_to_keep = 2}), results,
                                       LambdaCallback({.on_epoch_begin = wait})},
                         .validation_data = data});
    if (strategy.is_chief()) history = returned;
    if (strategy.task_type() == "evaluator") {
      followed = results->seen;
    } else if (!strategy.is_chief()) {
      EXPECT_TRUE(results->seen.empty());
    }
  }));
  ASSERT_FALSE(followed.empty());
  EXPECT_EQ(followed.back().first, 80);
  for (const auto& [step, logs] : followed) {
    ASSERT_EQ(step % 4, 0);
    for (const auto& [name, value] : logs) {
      EXPECT_NEAR(value, history["val_" + name].at(static_cast<std::size_t>(step / 4 - 1)), 1e-9) << name << step;
    }
  }
}

}  // namespace
}  // namespace lockstep
