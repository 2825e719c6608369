// Measures how long a step waits for a full checkpoint of 300 MB (25 million parameters and Adam's state). One worker
// writes it, before the next step or in the background; or several each copy and write a part.
//
//   build/release/benchmarks/checkpoint_pause [FOLDER]
//   build/release/lockstep run -n 2 build/release/benchmarks/checkpoint_pause [FOLDER]
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <string>

namespace ls = lockstep;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int kUnits = 5000;

// Seconds from the end of the first step, an epoch, to the beginning of the next one.
double pause_of(const ls::MultiWorkerMirroredStrategy& strategy, const std::string& folder, bool background) {
  const auto scope = strategy.scope();
  ls::Sequential model({ls::Dense(kUnits)});
  model.compile({.optimizer = ls::Adam(), .loss = "mse"});
  const auto data = ls::Dataset::from_tensor_slices(at::ones({4, kUnits}), at::ones({4, kUnits})).batch(4);
  Clock::time_point before;
  double pause = 0;
  const auto begins =
      ls::LambdaCallback({.on_train_batch_end = [&](std::int64_t, const ls::Logs&) { before = Clock::now(); }});
  const auto ends = ls::LambdaCallback({.on_epoch_begin = [&](int epoch) {
    if (epoch == 1) pause = std::chrono::duration<double>(Clock::now() - before).count();
  }});
  model.fit(data, {.epochs = 2,
                   .verbose = 0,
                   .callbacks = {begins, ls::BackupAndRestore(folder, {.background = background}), ends}});
  if (strategy.is_chief()) std::filesystem::remove_all(folder);
  return pause;
}

}  // namespace

int main(int count, char** words) {
  const std::string folder = count > 1 ? words[1] : "checkpoint_pause";
  const ls::MultiWorkerMirroredStrategy strategy({.threads_per_replica = 1});
  const double waiting = pause_of(strategy, folder, false), background = pause_of(strategy, folder, true);
  if (strategy.is_chief())
    std::cout << "a step waits for a checkpoint of 300 MB for " << waiting << " s; written in the background, for "
              << background << " s\n";
}
