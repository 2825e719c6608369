// Trains a small model with everything that a restart must bring back: Dropout, shuffling, Adam, changing rates,
// BatchNormalization, and callbacks that count. resume_program FOLDER STEP SIGNAL sends itself SIGNAL at global step
// STEP (-1: never), or runs SIGNAL where it is a command. Under `lockstep run` its workers have a replica each. With a
// fourth argument only that worker acts, in the job's first attempt. A fifth is the workers' deadline in seconds.
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>

#include <csignal>
#include <cstdlib>
#include <iostream>

using namespace lockstep;

int main(int argc, char** argv) {
  const std::string folder = argv[1];
  const std::int64_t step_of_signal = std::atoll(argv[2]);
  const std::string act = argv[3];

  set_random_seed(3);
  // `lockstep run` and Slurm tell ranks and restarts by these variables.
  const auto told = [](const char* name, const char* by_slurm, const char* otherwise) -> std::string {
    for (const char* const variable : {name, by_slurm}) {
      if (const char* const value = std::getenv(variable)) return value;
    }
    return otherwise;
  };
  const auto rank = told("LOCKSTEP_RANK", "SLURM_PROCID", "");
  const bool worker = !rank.empty();
  const bool first_life = told("LOCKSTEP_RESTART", "SLURM_RESTART_COUNT", "0") == "0";
  const bool acts = first_life && (argc < 5 || rank == argv[4]);
  const auto strategy =
      worker ? Strategy(MultiWorkerMirroredStrategy(
                   {.devices = {"cpu:0"}, .communication = {.timeout_seconds = argc < 6 ? 60 : std::atof(argv[5])}}))
             : Strategy(MirroredStrategy(2));
  const auto scope = strategy.scope();
  const auto x = at::linspace(-1, 1, 50 * 8).view({50, 8}).sin();
  const auto y = x.sum(1).gt(0).to(at::kLong);
  const auto noise = [](Example example) {
    example.x = example.x + at::rand({8}) * 0.1;
    return example;
  };
  const auto data = Dataset::from_tensor_slices(x, y).map(noise).shuffle(30).batch(8);

  Sequential model({Dense(16, {.activation = "relu"}), BatchNormalization(), Dropout(0.5), Dense(2)});
  model.compile({.optimizer = Adam({.learning_rate = 0.01}),
                 .loss = SparseCategoricalCrossentropy({.from_logits = true}),
                 .metrics = {"accuracy"}});
  const auto act_at_step = [&](std::int64_t, const Logs&) {
    if (!acts || model.iterations() != step_of_signal) return;
    const int signal = std::atoi(act.c_str());
    if (signal != 0) std::raise(signal);
    if (signal == 0 && std::system(act.c_str()) != 0) throw Error("failed: " + act);
  };
  try {
    const auto history = model.fit(
        data, {.epochs = 4,
               .verbose = 0,
               .callbacks = {LambdaCallback({.on_train_batch_end = act_at_step}),
                             BackupAndRestore(folder + "/backup", {.save_freq = 3}),
                             LearningRateScheduler([](int, double rate) { return rate * 0.8; }),
                             CSVLogger(folder + "/log.csv"),
                             EarlyStopping({.monitor = "loss", .patience = 3, .restore_best_weights = true})}});
    if (act == "fail after fit") return 7;
    model.save_weights(folder + "/final");
    if (strategy.is_chief()) std::cout << "epochs in the history: " << history.epoch.size() << "\n";
  } catch (const Interrupted& interrupted) {
    std::cout << interrupted.what() << "\n";
    return 3;
  } catch (const Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
