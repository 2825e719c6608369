// Measures a step of a click model with parameter servers. The model has an embedding table of ROWS x 32, 26 ids an
// example, and dense layers of 64, 32 and 1. Every process of the job runs it; the chief prints a line of JSON.
//   lockstep run --workers 2 --ps 1 build/release/benchmarks/click_step --rows 1000000
#include <ATen/Functions.h>
#include <lockstep/lockstep.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "../examples/arguments.h"

using namespace lockstep;

namespace {

constexpr std::int64_t kFields = 26, kWidth = 32, kBatches = 20;

struct Options {
  std::int64_t rows = 1'000'000;
  std::int64_t batch = 512;
  std::int64_t steps = 200;
  bool synchronous = false;
  std::string backup;
};

// Returns the bytes that this host's loopback has sent so far.
double loopback_bytes() {
  std::ifstream file("/proc/net/dev");
  for (std::string line; std::getline(file, line);) {
    const auto name = line.find("lo:");
    if (name == std::string::npos) continue;
    std::istringstream numbers(line.substr(name + 3));
    double bytes = 0;
    numbers >> bytes;
    return bytes;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  Arguments arguments("Measures steps of a click model");
  arguments.option("--rows", options.rows, "of the table");
  arguments.option("--batch", options.batch, "examples a step");
  arguments.option("--steps", options.steps, "steps a run; the best of three runs counts");
  arguments.flag("--synchronous", options.synchronous, "workers compute each step together");
  arguments.option("--backup", options.backup, "folder of checkpoints, one every 100 steps");
  arguments.parse(argc, argv);

  set_random_seed(1);
  at::manual_seed(1);  // so that all processes have the same data
  const ParameterServerStrategy strategy({.threads_per_replica = 1, .synchronous = options.synchronous});
  std::cout << strategy.task_type() << " " << strategy.task_index() << " at " << getpid() << std::endl;
  const auto scope = strategy.scope();
  Sequential model({ShardedEmbedding(options.rows, kWidth), Flatten(), Dense(64, {.activation = "relu"}),
                    Dense(32, {.activation = "relu"}), Dense(1)});
  model.compile({.optimizer = Adagrad({.learning_rate = 0.01}), .loss = BinaryCrossentropy({.from_logits = true})});

  const auto ids = at::randint(options.rows, {options.batch * kBatches, kFields}, at::kLong);
  const auto clicks = at::randint(2, {options.batch * kBatches, 1}, at::kFloat);
  const auto data = Dataset::from_tensor_slices(ids, clicks).batch(options.batch).repeat();
  double longest_pause = 0;
  const auto fit = [&](std::int64_t steps) {
    auto last = std::chrono::steady_clock::now();
    std::vector<AnyCallback> callbacks{LambdaCallback({.on_train_batch_end = [&](std::int64_t, const Logs&) {
      const auto now = std::chrono::steady_clock::now();
      longest_pause = std::max(longest_pause, std::chrono::duration<double>(now - last).count());
      last = now;
    }})};
    if (!options.backup.empty()) callbacks.emplace_back(BackupAndRestore(options.backup, {.save_freq = 100}));
    model.fit(data, {.verbose = 0, .callbacks = callbacks, .steps_per_epoch = steps});
  };
  fit(40);
  double best = 0, sent = 0;
  for (int run = 0; run < 3; ++run) {
    const auto before = loopback_bytes();
    const auto start = std::chrono::steady_clock::now();
    fit(options.steps);
    const auto steps = static_cast<double>(options.steps);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / steps;
    if (run > 0 && seconds > best) continue;
    best = seconds;
    sent = (loopback_bytes() - before) / steps;
  }
  if (!strategy.is_chief()) return 0;
  std::cout << nlohmann::ordered_json{{"rows", options.rows},
                                      {"batch", options.batch},
                                      {"ms_per_step", 1e3 * best},
                                      {"samples_per_s", static_cast<double>(options.batch) / best},
                                      {"loopback_bytes_per_step", sent},
                                      {"longest_pause_s", longest_pause}}
                   .dump()
            << "\n";
}
