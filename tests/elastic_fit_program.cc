// For elastic_fit_test: a training some of whose workers are lost.
#include <lockstep/lockstep.h>
#include <lockstep/parallel.h>
#include <signal.h>
#include <torch/nn/module.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

int number(const char* name, int otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

double scaled(double ratio) {
  const char* const rule = std::getenv("SCALING");
  return rule != nullptr && std::string(rule) == "sqrt" ? lockstep::square_root_scaling(ratio)
                                                        : lockstep::linear_scaling(ratio);
}

struct Worker {
  lockstep::Strategy strategy;
  int rank;
};

Worker worker_on_mesh(const std::string& printed, const lockstep::ElasticOptions& elastic) {
  std::vector<lockstep::DeviceMesh::Axis> axes;
  std::istringstream words(printed);
  for (lockstep::DeviceMesh::Axis axis; words >> axis.name >> axis.size;) axes.push_back(axis);
  const lockstep::DeviceMesh mesh(
      axes, {.timeout_seconds = number("TIMEOUT", 600) * 1.0, .group = {.lost_host_seconds = 3}, .elastic = true});
  lockstep::ModelParallelOptions options{.shard_optimizer_state = number("SHARD", 0) == 1,
                                         .compare_copies_every = number("COMPARE", 100),
                                         .elastic = elastic,
                                         .threads_per_replica = 1};
  if (mesh.contains("tensor")) {
    options.layout_map = {
        {"dense.weight", {"tensor", ""}}, {"dense.bias", {"tensor"}}, {"dense_1.weight", {"", "tensor"}}};
  }
  if (mesh.contains("pipeline")) options.layers_of_stages = {1 + number("NORM", 0), 1};
  if (mesh.contains("shard")) options.fully_shard = {.units = {"dense*"}};
  return {lockstep::ModelParallelStrategy(mesh, options), mesh.ranks().rank()};
}

Worker worker_with_whole_models(const lockstep::ElasticOptions& elastic) {
  std::vector<std::string> devices;
  for (int i = 0; i < number("REPLICAS", 1); ++i) devices.push_back("cpu:" + std::to_string(i));
  const lockstep::MultiWorkerMirroredStrategy strategy(
      {.devices = devices,
       .threads_per_replica = 1,
       .communication = {.timeout_seconds = number("TIMEOUT", 600) * 1.0},
       .shard_optimizer_state = number("SHARD", 0) == 1,
       .elastic = elastic,
       .diloco = number("DILOCO", 0) > 0 ? std::optional(lockstep::DiLoCoOptions{.steps = number("DILOCO", 0)})
                                         : std::nullopt,
       .compare_copies_every = number("COMPARE", 100),
       .replace_differing_copies = number("REPLACE", 0) == 1});
  return {strategy, strategy.worker_rank()};
}

double seconds(Clock::time_point since) { return std::chrono::duration<double>(Clock::now() - since).count(); }

}  // namespace

// The environment: EPOCHS of 20 steps of the same batches; STEP_MS of work in each; FOLDER for a log and checkpoints,
// MIN_WORKERS, JOIN_SECONDS. VICTIM is killed in the step numbered STEP, from 0 on, at PLACE: "forward", "batch end" (a
// callback), or so many microseconds after its forward pass. With another PLACE it does other things there: it hangs
// ("hang"), throws ("throw"), or prints that it is in that step ("print"). With "slow" all its steps take three times
// as long. A worker that joins prints when. TIMEOUT: of a collective operation, in seconds. UNITS_OF_JOINING: of the
// first layer of those that join. KILOBYTES: to be printed in each step. FITS: how many trainings one after the other,
// with an evaluation and a prediction after each; with PLACE "predict" VICTIM is killed in the first prediction.
// VALIDATE=0: without validation.
//
// MODELS=2: a second model, made before the first fit, is trained too. MORE_S: seconds of work after the last fit.
// RECORD: the number of an example with which every worker throws. SECOND: a worker that is killed in the same step,
// SECOND_US microseconds after its forward pass. PLACE "corrupt": VICTIM's weights change by a fault after that step.
// SHARD=1: the optimizer's state is sharded. CLIP=1: gradients are clipped by their norm. REPLICAS: of each worker.
// START_S: seconds until it begins. BACKGROUND=1: checkpoints are written in the background. KILL_ALSO: other workers,
// as digits, that are killed at the same place. NORM=1: with batch normalization. WORKER_BATCH: the batches are a
// worker's, and the rate is for so many workers, by the rule SCALING ("linear", or "sqrt"); with SGD. COMPARE: steps
// between comparing copies; REPLACE=1: copies that differ are replaced. MESH: "data 2 tensor 2": a
// ModelParallelStrategy on these axes, where places count from the begin of a step, and not from its forward pass.
// WEIGHTS: a file for its weights. LOAD: a file of weights from which it begins. DILOCO: workers train by themselves,
// and meet after so many steps.
int main() {
  try {
    sleep(static_cast<unsigned>(number("START_S", 0)));
    lockstep::ElasticOptions elastic{.min_workers = number("MIN_WORKERS", 1),
                                     .join_seconds = number("JOIN_SECONDS", 30) * 1.0};
    if (const int workers = number("WORKER_BATCH", 0)) {
      elastic.worker_batch = lockstep::WorkerBatch{.learning_rate_workers = workers, .scaling = scaled};
    }
    const char* const mesh = std::getenv("MESH");
    auto [strategy, rank] = mesh != nullptr ? worker_on_mesh(mesh, elastic) : worker_with_whole_models(elastic);
    const bool joins = number("LOCKSTEP_JOIN", 0) == 1;
    const char* const also = std::getenv("KILL_ALSO");
    const auto also_killed = std::string(also == nullptr ? "" : also);
    const bool is_victim =
        !joins && (rank == number("VICTIM", -1) || also_killed.find(std::to_string(rank)) != std::string::npos);
    const int at = number("STEP", -1);
    const char* const given = std::getenv("PLACE");
    const std::string place = given == nullptr ? "" : given;
    std::cout << "worker at " << getpid() << std::endl;
    const auto x = at::sin(at::arange(240 * 6, at::kDouble)).view({240, 6});
    const auto all_y = x.cumsum(1).slice(1, 2, 5);
    const int record = number("RECORD", -1);
    const bool is_second = !joins && rank == number("SECOND", -1);
    int steps = 0;  // forwards of this worker
    std::jthread killer;
    const auto work = [&] {
      const unsigned times = is_victim && place == "slow" ? 3 : 1;
      usleep(static_cast<unsigned>(number("STEP_MS", 0)) * 1000 * times);
    };
    const auto in_step = [&] {
      const auto die_after = [&](unsigned microseconds) {
        killer = std::jthread([microseconds] {
          usleep(microseconds);
          raise(SIGKILL);
        });
      };
      if (steps == at && is_second) die_after(static_cast<unsigned>(number("SECOND_US", 0)));
      if (steps++ == at && is_victim) {
        if (place == "forward") raise(SIGKILL);
        while (place == "hang") pause();
        if (place == "throw") throw std::runtime_error("this machine is broken");
        if (place == "print") std::cout << "step " << at << std::endl;
        if (place.find_first_not_of("0123456789") == std::string::npos)
          die_after(static_cast<unsigned>(std::stoi(place)));
      }
    };
    const auto loss = [&](const at::Tensor& y, const at::Tensor& out) {
      if (mesh == nullptr) work();
      if (record >= 0 && (y == all_y[record]).all(1).any().item<bool>()) throw std::runtime_error("a bad record");
      if (mesh == nullptr) in_step();
      return (out - y).square().mean(1);
    };
    const auto data = lockstep::Dataset::from_tensor_slices(x, all_y).shuffle(240, {.seed = 3}).batch(12);
    const auto scope = strategy.scope();
    std::vector<lockstep::Layer> layers{lockstep::Dense(joins ? number("UNITS_OF_JOINING", 8) : 8,
                                                        {.activation = "tanh", .kernel_initializer = "ones"}),
                                        lockstep::Dense(3, {.kernel_initializer = "ones"})};
    if (number("NORM", 0) == 1) layers.insert(layers.begin() + 1, lockstep::BatchNormalization());
    lockstep::Sequential model(layers);
    lockstep::AdamOptions adam_options{.learning_rate = 0.01};
    if (number("CLIP", 0) == 1) adam_options.global_clipnorm = 1.5;
    const lockstep::Optimizer adam = lockstep::Adam(adam_options);
    model.compile({.optimizer = elastic.worker_batch ? lockstep::SGD({.learning_rate = 0.01}) : adam,
                   .loss = lockstep::Loss("squares", loss),
                   .metrics = {"mean_absolute_error"}});
    lockstep::Sequential second(
        {lockstep::Dense(4, {.kernel_initializer = "ones"}), lockstep::Dense(3, {.kernel_initializer = "ones"})});
    second.compile({.optimizer = lockstep::SGD({.learning_rate = 0.01}), .loss = "mse"});
    if (number("MODELS", 1) == 2) second.build({6}, at::kDouble);
    if (const char* const path = std::getenv("LOAD")) model.load_weights(path);
    auto last = Clock::now();
    double longest = 0;
    std::int64_t ended = 0;
    const std::string line(1023, '.');
    const auto on_batch = [&](std::int64_t, const lockstep::Logs&) {
      for (int n = number("KILOBYTES", 0); n > 0; --n) std::cout << line << "\n";
      longest = std::max(longest, seconds(last));
      last = Clock::now();
      const bool starts_again = number("LOCKSTEP_RESTART", 0) > 0;
      if (ended == 0 && (joins || starts_again))
        std::cout << (joins ? "joined at step " : "starts again at step ") << model.iterations() << std::endl;
      const bool is_there = ended++ == at && is_victim;
      if (is_there && place == "batch end") raise(SIGKILL);
      if (is_there && place == "corrupt") {
        const at::NoGradGuard no_grad;
        model.module<torch::nn::Module>()->parameters()[0].add_(1e-3);
      }
    };
    std::vector<lockstep::AnyCallback> callbacks{
        lockstep::LambdaCallback({.on_epoch_begin = [&](int) { last = Clock::now(); },
                                  .on_train_batch_begin =
                                      [&](std::int64_t) {
                                        if (mesh == nullptr) return;
                                        work();
                                        in_step();
                                      },
                                  .on_train_batch_end = on_batch})};
    if (const char* const folder = std::getenv("FOLDER")) {
      const bool background = number("BACKGROUND", 0) == 1;
      callbacks.emplace_back(
          lockstep::BackupAndRestore(std::string(folder) + "/backup", {.save_freq = 2, .background = background}));
      callbacks.emplace_back(lockstep::CSVLogger(std::string(folder) + "/log.csv"));
      callbacks.emplace_back(
          lockstep::ModelCheckpoint(std::string(folder) + "/ckpt-{epoch}", {.background = background}));
    }
    lockstep::History history;
    int predicted = 0;
    const auto read = [&](lockstep::Example example) {
      if (is_victim && place == "predict" && ++predicted == 5) raise(SIGKILL);
      return example;
    };
    for (int fit = 0; fit < number("FITS", 1); ++fit) {
      if (fit > 0) {
        const double loss_now = model.evaluate(data)["loss"];
        const double mean = model.predict(data.map(read)).mean().item<double>();
        std::cout << std::setprecision(15) << "between fits " << loss_now << " " << mean << std::endl;
      }
      history = model.fit(data, {.epochs = number("EPOCHS", 3),
                                 .verbose = 0,
                                 .callbacks = callbacks,
                                 .validation_data = number("VALIDATE", 1) == 1 ? std::optional(data) : std::nullopt});
    }
    if (number("MODELS", 1) == 2) {
      second.fit(data, {.epochs = 2, .verbose = 0});
      second.fit(data, {.epochs = 1, .verbose = 0});
      std::cout << std::setprecision(15) << "second " << second.evaluate(data)["loss"] << std::endl;
    }
    sleep(static_cast<unsigned>(number("MORE_S", 0)));
    std::ostringstream out;
    out << std::setprecision(15);
    const auto add = [&](const at::Tensor& parameter) {
      out << " " << parameter.sum().item<double>() << " " << parameter.square().sum().item<double>();
    };
    if (const char* const path = std::getenv("WEIGHTS")) {  // of a mesh, whose ranks have parts
      model.save_weights(path);
      auto saved = lockstep::read_archive(path);
      for (auto& [name, weights] : saved.tensors) add(at::from_blob(weights.bytes.data(), weights.shape, at::kDouble));
    } else {
      for (const auto& parameter : model.module<torch::nn::Module>()->parameters()) add(parameter);
    }
    std::cout << "steps " << model.iterations() << ", weights" << out.str() << std::endl;
    std::cout << std::setprecision(15) << "history";
    for (const auto& [name, values] : history.history) {
      for (const double value : values) std::cout << " " << value;
    }
    std::cout << std::endl << "longest " << longest << ", chief " << (strategy.is_chief() ? 1 : 0) << std::endl;
    return 0;
  } catch (const lockstep::Interrupted&) {
    std::cout << "left" << std::endl;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "failed: " << error.what() << std::endl;
    return 1;
  }
}
