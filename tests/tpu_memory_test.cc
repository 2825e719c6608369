// Measures the memory of trainings by TPUStrategy, on the plugin for CPUs, whose devices' memory is this process's.
#include <malloc.h>

#include <fstream>
#include <sstream>

#include "strategy/unwrap.h"
#include "tests/tpu_testing.h"
#include "tpu/programs/programs.h"

namespace lockstep {
namespace {

// "VmRSS": what the process has now; "VmHWM": the most since reset_peak.
double mebibytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    std::istringstream words(line);
    std::string key;
    double kibibytes = 0;
    if (words >> key >> kibibytes && key == name + ":") return kibibytes / 1024;
  }
  throw Error("/proc/self/status has no " + name);
}

void reset_peak() {
  malloc_trim(0);
  std::ofstream file("/proc/self/clear_refs");
  if (!(file << 5 << std::flush)) throw Error("the peak of memory cannot be reset: /proc/self/clear_refs");
}

// README's network.
Model seed_cnn(const Strategy& strategy) {
  const auto scope = strategy.scope();
  auto model = Sequential(
      {Conv2D(32, 3, {.activation = "relu"}), MaxPooling2D(), Flatten(), Dense(64, {.activation = "relu"}), Dense(10)});
  model.compile(
      {.optimizer = Adam(), .loss = SparseCategoricalCrossentropy({.from_logits = true}), .metrics = {"accuracy"}});
  return model;
}

Dataset images(std::int64_t count) {
  return Dataset::from_tensor_slices(at::randn({count, 1, 28, 28}), at::randint(10, {count}));
}

TEST(TpuMemory, DoesNotGrowIn2000Steps) {
  auto model = seed_cnn(tpu(2));
  const auto data = images(800).batch(4);
  model.fit(data, {.epochs = 3, .verbose = 0});
  malloc_trim(0);
  const auto before = mebibytes("VmRSS");
  model.fit(data, {.epochs = 10, .verbose = 0});
  malloc_trim(0);
  // A third of what one batch's images would be, if each step kept them.
  EXPECT_LT(mebibytes("VmRSS") - before, 8) << "MiB, after " << before;
}

TEST(TpuMemory, AStepTakesWhatItsCompilerSays) {
  const auto strategy = tpu(1);
  auto model = seed_cnn(strategy);
  const auto data = images(2048).batch(1024);
  model.fit(data, {.epochs = 2, .verbose = 0});
  const auto said = static_cast<double>(programs::devices_of(unwrap(strategy)).counts().bytes) / (1 << 20);
  reset_peak();
  const auto before = mebibytes("VmRSS");
  model.fit(data, {.epochs = 2, .verbose = 0});
  const auto taken = mebibytes("VmHWM") - before;
  EXPECT_LE(taken, 1.2 * said);
  EXPECT_GE(taken, 0.5 * said);
}

}  // namespace
}  // namespace lockstep
