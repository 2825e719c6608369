// How long a training step takes, and where the time goes:
//   train_step --model seed_cnn --replicas 2 --threads 1 --steps 200 [--fit]
// Bare steps train on one batch in memory; --fit measures whole epochs through fit, with shuffling, metrics and the
// progress line.
#include <lockstep/lockstep.h>

#include <ATen/Functions.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

using namespace lockstep;

namespace {

struct Options {
  std::string model = "seed_cnn";
  int replicas = 1;
  int threads = 1;
  int steps = 200;
  int batch = 64;  // images a replica
  bool fit = false;
};

struct Work {
  std::vector<Layer> layers;
  std::vector<std::int64_t> input;
};

// The models of the comparison with other libraries, as a user writes them.
Work work_named(const std::string& name) {
  if (name == "seed_cnn") {
    return {{Conv2D(32, 3, {.activation = "relu"}), MaxPooling2D(), Flatten(), Dense(64, {.activation = "relu"}),
             Dense(10)},
            {1, 28, 28}};
  }
  if (name == "mlp")
    return {{Flatten(), Dense(512, {.activation = "relu"}), Dense(512, {.activation = "relu"}), Dense(10)}, {784}};
  const Conv2DOptions same{.padding = "same", .activation = "relu"};
  return {{Conv2D(32, 3, same), Conv2D(32, 3, same), MaxPooling2D(), Conv2D(64, 3, same), Conv2D(64, 3, same),
           MaxPooling2D(), Flatten(), Dense(512, {.activation = "relu"}), Dense(10)},
          {3, 32, 32}};
}

struct Measured {
  double seconds_a_step = 0;
  StepTimes times;
};

StepTimes operator-(const StepTimes& a, const StepTimes& b) {
  return {a.steps - b.steps,
          a.input - b.input,
          a.forward - b.forward,
          a.backward - b.backward,
          a.reduce_and_update - b.reduce_and_update,
          a.metrics - b.metrics,
          a.total - b.total};
}

// The best of three runs of `steps` calls, after a warm-up.
template <class Step>
Measured best_of_three(Model& model, int steps, const Step& run) {
  run(std::max(1, steps / 5));
  Measured best;
  for (int round = 0; round < 3; ++round) {
    const auto times = model.step_times();
    const auto start = std::chrono::steady_clock::now();
    run(steps);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / steps;
    if (round == 0 || seconds < best.seconds_a_step) best = {seconds, model.step_times() - times};
  }
  return best;
}

Measured measure(const Options& options) {
  std::vector<std::string> devices;
  for (int i = 0; i < options.replicas; ++i) devices.push_back("cpu:" + std::to_string(i));
  const MirroredStrategy strategy({.devices = devices, .threads_per_replica = options.threads});
  const auto scope = strategy.scope();
  const auto work = work_named(options.model);
  Sequential model(work.layers);
  model.compile({.loss = SparseCategoricalCrossentropy({.from_logits = true}),
                 .optimizer = Adam(),
                 .metrics = options.fit ? std::vector<Metric>{"accuracy"} : std::vector<Metric>{}});
  model.build(work.input);

  const std::int64_t global_batch = std::int64_t{options.batch} * options.replicas;
  const std::int64_t examples = options.fit ? global_batch * 100 : global_batch;
  std::vector<std::int64_t> sizes{examples};
  sizes.insert(sizes.end(), work.input.begin(), work.input.end());
  const Example data{at::rand(sizes), at::randint(10, {examples}, at::kLong)};
  if (!options.fit) {
    return best_of_three(model, options.steps, [&](int steps) {
      for (int i = 0; i < steps; ++i) model.train_on_batch(data);
    });
  }
  const auto batches = Dataset::from_tensor_slices(data.x, data.y).cache().shuffle(10'000).batch(global_batch).repeat();
  return best_of_three(model, options.steps,
                       [&](int steps) { model.fit(batches, {.steps_per_epoch = steps, .verbose = 0}); });
}

void report(const Options& options, const Measured& measured) {
  const double samples = options.batch * options.replicas / measured.seconds_a_step;
  const double total = measured.seconds_a_step * static_cast<double>(measured.times.steps);
  std::printf("%s: %d replica(s) of %d thread(s), batch %d each, %s\n", options.model.c_str(), options.replicas,
              options.threads, options.batch, options.fit ? "through fit" : "bare steps");
  std::printf("  %.3f ms a step, %.0f samples/s\n", measured.seconds_a_step * 1e3, samples);
  const auto share = [&](const char* name, double seconds) {
    std::printf("  %5.1f%%  %s\n", 100 * seconds / total, name);
  };
  share("input", measured.times.input);
  share("forward", measured.times.forward);
  share("backward", measured.times.backward);
  share("reduce and update (waiting for the slowest replica included)", measured.times.reduce_and_update);
  share("metrics", measured.times.metrics);
  const nlohmann::ordered_json line{{"model", options.model},
                                    {"replicas", options.replicas},
                                    {"threads", options.threads},
                                    {"batch", options.batch},
                                    {"fit", options.fit},
                                    {"ms_per_step", measured.seconds_a_step * 1e3},
                                    {"samples_per_s", samples},
                                    {"share_input", measured.times.input / total},
                                    {"share_forward", measured.times.forward / total},
                                    {"share_backward", measured.times.backward / total},
                                    {"share_reduce_and_update", measured.times.reduce_and_update / total}};
  std::cout << line.dump() << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Measures training steps");
  app.add_option("--model", options.model, "what to train")
      ->check(CLI::IsMember({"seed_cnn", "mlp", "cifar_cnn"}))
      ->capture_default_str();
  app.add_option("--replicas", options.replicas, "logical CPUs")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--threads", options.threads, "threads a replica")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--steps", options.steps, "steps of each of three rounds")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch", options.batch, "images a replica")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_flag("--fit", options.fit, "measure through fit");
  CLI11_PARSE(app, argc, argv);
  try {
    report(options, measure(options));
  } catch (const std::exception& error) {
    std::cerr << "train_step: " << error.what() << "\n";
    return 1;
  }
}
