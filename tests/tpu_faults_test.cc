// TPUStrategy where a program does not fit, or a device is lost: what is said, and that a checkpoint restores the
// training.
#include <filesystem>

#include "base/expect_says_testing.h"
#include "gradient/replicated_parameters.h"
#include "strategy/unwrap.h"
#include "tests/tpu_testing.h"

namespace lockstep {
namespace {

// Sets a fault in the environment as long as this lives.
class WithFault {
 public:
  explicit WithFault(const char* fault) { setenv("FAULT", fault, 1); }
  ~WithFault() { unsetenv("FAULT"); }
  WithFault(const WithFault&) = delete;
  WithFault& operator=(const WithFault&) = delete;
};

TPUStrategy failing_tpu() {
  return TPUStrategy(
      TPUClusterResolver("", {.plugin = FAILING_PLUGIN, .plugin_options = {{"cpu_device_count", std::int64_t{2}}}}));
}

Model new_model(const Strategy& strategy, std::uint64_t seed = 7) {
  set_random_seed(seed);
  const auto scope = strategy.scope();
  auto model = Model([] { return Normalized(0.0); });
  model.compile({.optimizer = Adam(), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
  return model;
}

Dataset images() {
  at::manual_seed(4);
  return Dataset::from_tensor_slices(at::randn({48, 1, 12, 12}), at::randint(10, {48})).batch(8);
}

TEST(TpuFaults, AProgramThatDoesNotFitIsNamed) {
  const auto strategy = failing_tpu();
  auto model = new_model(strategy);
  const WithFault fault("compile");
  expect_says(message_of<DeviceError>([&] { model.fit(images(), {.verbose = 0}); }),
              "the training step for 2 x cpu: compile a program: Ran out of memory in memory space hbm. Used 17.25G "
              "of 15.75G hbm. Exceeded hbm capacity by 1.50G. (RESOURCE_EXHAUSTED)");
}

// Loses a device in a step of the second epoch.
class Lost : public Callback {
 public:
  explicit Lost(const char* how) : how_(how) {}
  void on_train_batch_begin(std::int64_t batch) override {
    if (epoch_ == 1 && batch == 3) fault_.emplace(how_);
  }
  void on_epoch_begin(int epoch) override { epoch_ = epoch; }

 private:
  const char* const how_;
  int epoch_ = 0;
  std::optional<WithFault> fault_;
};

class TpuFaults : public testing::TestWithParam<const char*> {};

TEST_P(TpuFaults, ATrainingGoesOnFromItsBackupWhereADeviceWasLost) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "tpu_faults";
  std::filesystem::remove_all(folder);
  const auto data = images();
  const auto fit = [&](Model& model, std::vector<AnyCallback> callbacks) {
    callbacks.push_back(BackupAndRestore(folder.string(), {.save_freq = 2}));
    return model.fit(data, {.epochs = 3, .verbose = 0, .callbacks = callbacks});
  };
  auto whole = new_model(tpu(2));
  whole.fit(data, {.epochs = 3, .verbose = 0});
  {
    auto model = new_model(failing_tpu());
    const auto message = message_of<DeviceError>([&] { fit(model, {std::make_shared<Lost>(GetParam())}); });
    expect_says(message, "The device TPU_1 halted: the chip does not answer (UNAVAILABLE)");
    expect_says(message, "the training step");
  }
  auto model = new_model(failing_tpu(), 8);  // whose own weights, from the beginning, would give others
  fit(model, {});
  const auto &a = unwrap(whole.module()), &b = unwrap(model.module());
  for (std::size_t i = 0; i < a.slots().size(); ++i) EXPECT_TRUE(at::equal(a.parameter(0, i), b.parameter(0, i))) << i;
}

INSTANTIATE_TEST_SUITE_P(When, TpuFaults, testing::Values("launch", "run"));

}  // namespace
}  // namespace lockstep
