// Measures a training step, and where its time goes.
//   train_step --model seed_cnn --replicas 2 --threads 1 --steps 200 [--fit]
// Bare steps train on one batch in memory. --fit measures whole epochs of Fashion-MNIST (seed_cnn) or of random data
// through fit, with shuffling, a metric, TensorBoard and checkpoints.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <lockstep/lockstep.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "../examples/arguments.h"
#include "models.h"

using namespace lockstep;

namespace {

struct Options {
  std::string model = "seed_cnn";
  std::string kind = "sequential";
  int replicas = 0;
  int threads = 1;
  int steps = 200;
  int batch = 64;  // examples a replica
  bool fit = false;
  std::string device = "cpu";
  bool jit_compile = false;
  bool multi_worker = false;
  bool parameter_servers = false;
  std::string gradient_dtype;  // that workers send
  std::int64_t diloco = 0;     // steps between meetings of workers that train by themselves; 0: they sum gradients
  std::string diloco_dtype;    // that they send
  bool shard_optimizer_state = false;
  bool elastic = false;
  bool reports = true;
};

struct Measured {
  double seconds_a_step = 0;
  StepTimes times;
  double optimizer_state_mib = 0;  // of this process
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
    if (round == 0 || seconds < best.seconds_a_step) best = {seconds, model.step_times() - times, 0};
  }
  best.optimizer_state_mib = static_cast<double>(model.optimizer().state_bytes()) / (1 << 20);
  return best;
}

Dataset fit_data(const Options& options, const Tensor& x, std::int64_t global_batch) {
  if (options.model != "seed_cnn") {
    return Dataset::from_tensor_slices(x, at::randint(10, {x.size(0)}, at::kLong))
        .cache()
        .shuffle(10'000)
        .batch(global_batch);
  }
  const auto scaled = [](Example e) {
    e.x = e.x.to(at::kFloat).div(255);
    return e;
  };
  return datasets::fashion_mnist().train.map(scaled).cache().shuffle(10'000).batch(global_batch,
                                                                                   {.drop_remainder = true});
}

// The best epoch of three, after one that fills the cache.
Measured measure_fit(Model& model, const Dataset& data) {
  const auto folder = std::filesystem::temp_directory_path() / ("lockstep_train_step_" + std::to_string(getpid()));
  const auto steps = static_cast<int>(data.cardinality());
  const auto measured = best_of_three(model, steps, [&](int) {  // the warm-up too is a whole epoch
    model.fit(data, {.verbose = 0,
                     .callbacks = {TensorBoard((folder / "logs").string()),
                                   ModelCheckpoint((folder / "ckpt").string(), {.save_weights_only = true})}});
  });
  std::filesystem::remove_all(folder);
  return measured;
}

// Steps that a chief assigns to workers, each on one of 20 batches in memory.
Measured measure_assigned(Model& model, const Tensor& x, const Options& options) {
  const auto labels = at::randint(10, {x.size(0)}, at::kLong);
  const auto data = Dataset::from_tensor_slices(x, labels).batch(options.batch).repeat();
  model.build(x.sizes().slice(1).vec());
  return best_of_three(model, options.steps,
                       [&](int steps) { model.fit(data, {.verbose = 0, .steps_per_epoch = steps}); });
}

Measured measure(Options& options) {
  at::manual_seed(1);  // so that all processes of a job make the same data
  std::vector<std::string> devices;
  for (int i = 0; i < std::max(1, options.replicas); ++i) devices.push_back(options.device + ":" + std::to_string(i));
  CommunicationOptions communication;
  const auto dtype_named = [](const std::string& name) -> std::optional<DType> {
    if (name.empty()) return {};
    return name == "int8" ? DType::int8 : DType::bfloat16;
  };
  communication.gradient_dtype = dtype_named(options.gradient_dtype);
  std::optional<DiLoCoOptions> diloco;
  if (options.diloco > 0) diloco = {.steps = options.diloco, .dtype = dtype_named(options.diloco_dtype)};
  const auto strategy =
      options.device == "tpu"     ? Strategy(TPUStrategy(TPUClusterResolver(), {.num_replicas = options.replicas}))
      : options.parameter_servers ? Strategy(ParameterServerStrategy({.threads_per_replica = options.threads}))
      : options.multi_worker      ? Strategy(MultiWorkerMirroredStrategy(
                                        {.devices = devices,
                                         .threads_per_replica = options.threads,
                                         .communication = communication,
                                         .shard_optimizer_state = options.shard_optimizer_state,
                                         .elastic = options.elastic ? std::optional(ElasticOptions()) : std::nullopt,
                                         .diloco = diloco}))
                             : Strategy(MirroredStrategy({.devices = devices, .threads_per_replica = options.threads}));
  options.replicas = strategy.num_replicas_in_sync();
  options.reports = strategy.is_chief();
  const auto scope = strategy.scope();
  const std::int64_t global_batch = std::int64_t{options.batch} * strategy.num_replicas_in_sync();
  const std::int64_t batches = options.parameter_servers ? 20 : 1;
  const std::int64_t examples =
      options.fit && options.model != "seed_cnn" ? global_batch * 100 : global_batch * batches;
  auto [model, x] = benchmarks::make_work(options.model, options.kind, examples);
  model.compile({.optimizer = Adam(),
                 .loss = SparseCategoricalCrossentropy({.from_logits = true}),
                 .metrics = options.fit ? std::vector<Metric>{"accuracy"} : std::vector<Metric>{},
                 .jit_compile = options.jit_compile});
  if (options.fit) return measure_fit(model, fit_data(options, x, global_batch));
  if (options.parameter_servers) return measure_assigned(model, x, options);

  const Example data{x, at::randint(10, {examples}, at::kLong)};
  model.train_on_batch(data);
  std::cout << R"({"event": "first step"})" << std::endl;
  return best_of_three(model, options.steps, [&](int steps) {
    for (int i = 0; i < steps; ++i) model.train_on_batch(data);
  });
}

// The memory that belongs to this process: its share of what it shares with others included.
double memory_mib() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;) {
    if (word == "Pss:" && file >> word) return std::stod(word) / 1024;
  }
  return 0;
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
                                    {"kind", options.kind},
                                    {"replicas", options.replicas},
                                    {"threads", options.threads},
                                    {"batch", options.batch},
                                    {"fit", options.fit},
                                    {"device", options.device},
                                    {"jit_compile", options.jit_compile},
                                    {"ms_per_step", measured.seconds_a_step * 1e3},
                                    {"samples_per_s", samples},
                                    {"memory_mib", memory_mib()},
                                    {"optimizer_state_mib", measured.optimizer_state_mib},
                                    {"share_input", measured.times.input / total},
                                    {"share_forward", measured.times.forward / total},
                                    {"share_backward", measured.times.backward / total},
                                    {"share_reduce_and_update", measured.times.reduce_and_update / total}};
  std::cout << line.dump() << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  Arguments arguments("Measures training steps");
  arguments.option("--model", options.model, "what to train").one_of({"seed_cnn", "mlp", "cifar_cnn", "transformer"});
  arguments
      .option("--kind", options.kind,
              "how the seed CNN is written: Sequential, a module that calls our operators, a plain one")
      .one_of({"sequential", "own", "plain"});
  arguments.option("--replicas", options.replicas, "logical CPUs, or GPUs (0: one), or devices of the plugin (0: all)")
      .from(0);
  arguments.option("--threads", options.threads, "threads a replica").from(1);
  arguments
      .option("--device", options.device,
              "what replicas run on; batches come from host memory. tpu: devices of a PJRT plugin")
      .one_of({"cpu", "cuda", "tpu"});
  arguments.flag("--jit-compile", options.jit_compile, "record the step on a GPU");
  arguments.option("--steps", options.steps, "steps of each of three rounds").from(1);
  arguments.option("--batch", options.batch, "examples a replica").from(1);
  arguments.flag("--multi-worker", options.multi_worker,
                 "with the workers that the environment tells; --replicas each");
  arguments.flag("--parameter-servers", options.parameter_servers,
                 "with the workers and servers that the environment tells");
  arguments.option("--gradient-dtype", options.gradient_dtype, "what workers send float gradients as")
      .one_of({"bfloat16", "int8"});
  arguments.option("--diloco", options.diloco, "steps after which workers that train by themselves meet").from(0);
  arguments.option("--diloco-dtype", options.diloco_dtype, "what they send float values as")
      .one_of({"bfloat16", "int8"});
  arguments.flag("--shard-optimizer-state", options.shard_optimizer_state, "each worker has its share of it alone");
  arguments.flag("--elastic", options.elastic, "they go on when one is lost");
  arguments.flag("--fit", options.fit, "measure through fit");
  arguments.parse(argc, argv);
  try {
    const auto measured = measure(options);
    if (options.reports) report(options, measured);
  } catch (const std::exception& error) {
    std::cerr << "train_step: " << error.what() << "\n";
    return 1;
  }
}
