// Runs fit with workers that are lost, leave and come, at places that a seed draws (tests/simulated_workers.h). All
// that remain get the results of one process.
#include "tests/simulated_workers.h"

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <ATen/ATen.h>

#include <cstdlib>
#include <filesystem>

#include "base/fresh_folder_testing.h"
#include "checkpoint/safetensors.h"
#include "data/stored_tensor.h"
#include "tests/workers.h"
#include "train/signal_guard.h"

namespace lockstep {
namespace {

constexpr int kEpochs = 3, kStepsOfAnEpoch = 5;
constexpr double kNear = 1e-11;  // for doubles that are added in another order

Dataset data() {
  const auto x = waves(4 * kStepsOfAnEpoch - 1, 3);  // the last batch is smaller
  return Dataset::from_tensor_slices(x, x.sum(1, true).cos()).shuffle(100, {.seed = 3}).batch(4);
}

struct Outcome {
  std::vector<Tensor> weights;
  std::vector<double> losses;  // those of the epochs of both fits
  double evaluated = 0;        // between both fits
};

struct Program {
  bool shards = false, in_background = false, validates = false, goes_on = false;
  bool is_apart = false;             // DiLoCo, which meets as often as backups are made
  std::map<int, int> told_to_leave;  // [worker]: after how many of its batches it is told
  std::filesystem::path folder;
};

// Two fits with an evaluation between them. `begin`: called when the first one begins.
Outcome train(
    const Program& program, int worker, const std::function<void()>& begin,
    const std::function<void()>& after_batch = [] {}) {
  Sequential model(
      {Dense(5, {.activation = "tanh", .kernel_initializer = "ones"}), Dense(1, {.kernel_initializer = "ones"})});
  model.compile({.optimizer = Adam({.learning_rate = 0.02}), .loss = MeanSquaredError(), .metrics = {"mae"}});
  model.build({3}, at::kDouble);
  int batches = 0;
  train::SignalGuard::of_thread = 0;
  const auto leaves = program.told_to_leave.find(worker);
  std::vector<AnyCallback> callbacks{
      LambdaCallback({.on_train_begin = begin,
                      .on_train_batch_end =
                          [&](std::int64_t, const Logs&) {
                            after_batch();
                            if (leaves != program.told_to_leave.end() && ++batches == leaves->second)
                              train::SignalGuard::of_thread = SIGTERM;
                          }}),
      BackupAndRestore((program.folder / "backup").string(), {.save_freq = 2, .background = program.in_background}),
      ModelCheckpoint((program.folder / "epoch-{epoch}").string(),
                      {.save_weights_only = true, .background = program.in_background})};
  const auto fit = [&](int epochs) {
    auto history = model.fit(data(), {.epochs = epochs,
                                      .verbose = 0,
                                      .callbacks = callbacks,
                                      .validation_data = program.validates ? std::optional(data()) : std::nullopt,
                                      .handle_signals = false});
    return history.history["loss"];  // of a newcomer that comes after this fit: empty
  };
  Outcome outcome{.weights = {}, .losses = fit(kEpochs)};
  outcome.evaluated = model.evaluate(data(), {.verbose = 0})["loss"];
  callbacks.erase(callbacks.begin() + 1, callbacks.end());
  for (const double loss : fit(1)) outcome.losses.push_back(loss);
  outcome.weights = weights_of(model);
  return outcome;
}

std::vector<Tensor> weights_in(const std::filesystem::path& path, const std::vector<Tensor>& like) {
  auto archive = read_archive(path.string());
  std::vector<Tensor> weights;
  for (const auto& [name, stored] : archive.tensors) weights.push_back(data::from_stored(stored));
  EXPECT_EQ(weights.size(), like.size()) << path;
  return weights;
}

// --- programs that a seed draws

struct Drawn {
  std::vector<simulated::Fate> fates;
  Program program;
  std::string described;
};

Drawn draw(unsigned seed, bool is_apart) {
  std::mt19937 random(seed);
  const auto below = [&](int end) { return static_cast<int>(random() % static_cast<unsigned>(end)); };
  Drawn drawn;
  auto& program = drawn.program;
  program.is_apart = is_apart;
  program.shards = below(3) == 0 && !is_apart;
  program.in_background = below(3) == 0;
  program.validates = below(2) == 0;
  program.goes_on = below(3) == 0;
  const int workers = 2 + below(3), newcomers = below(3);
  // With shards the neighbour of a worker that is lost has the only copy of its state.
  int may_be_lost = program.shards ? 1 : workers - 1;
  for (int i = 0; i < workers + newcomers; ++i) {
    simulated::Fate fate;
    if (i >= workers) fate.begins_after = 1 + below(600);
    if (may_be_lost > 0 && below(3) > 0) {
      --may_be_lost;
      if (below(4) > 0)
        fate.lost_at = 1 + below(400);
      else
        program.told_to_leave[i] = 1 + below(kEpochs * kStepsOfAnEpoch);
    }
    drawn.described +=
        text(i >= workers ? "a newcomer after " : "a worker",
             fate.begins_after > 0 ? text(fate.begins_after, " places") : "",
             fate.lost_at > 0 ? text(", lost at its place ", fate.lost_at) : "",
             program.told_to_leave.contains(i) ? text(", told to leave after batch ", program.told_to_leave.at(i)) : "",
             "; ");
    drawn.fates.push_back(fate);
  }
  drawn.described += text(program.shards ? "shards, " : "", program.in_background ? "saves in the background, " : "",
                          program.validates ? "validates, " : "", program.goes_on ? "goes on from a backup" : "");
  return drawn;
}

struct Alone {
  std::filesystem::path folder = fresh_folder("simulated_fits", "alone");
  Outcome outcome = [this] {
    const OneDeviceStrategy strategy("cpu:0", 1);
    const auto scope = strategy.scope();
    return train({.folder = folder}, 0, [] {});
  }();
};

const Alone& alone() {
  static const Alone made;
  return made;
}

// `losses_too`: not where a worker was lost: it may take its part of the losses along, after the update.
void expect_as_alone(const Outcome& outcome, bool losses_too) {
  EXPECT_LE(largest_difference(outcome.weights, alone().outcome.weights), kNear);
  EXPECT_NEAR(outcome.evaluated, alone().outcome.evaluated, kNear);
  ASSERT_EQ(outcome.losses.size(), alone().outcome.losses.size());
  for (std::size_t i = 0; losses_too && i < outcome.losses.size(); ++i)
    EXPECT_NEAR(outcome.losses[i], alone().outcome.losses[i], kNear) << "epoch " << i;
}

// The folder of a backup, of a training that broke off in the second epoch.
const std::filesystem::path& broken_off() {
  static const auto folder = [] {
    const auto made = fresh_folder("simulated_fits", "broken_off");
    const OneDeviceStrategy strategy("cpu:0", 1);
    const auto scope = strategy.scope();
    struct BreaksOff {};
    int batches = 0;
    try {
      train(
          {.folder = made}, 0, [] {},
          [&] {
            if (++batches == kStepsOfAnEpoch + 3) throw BreaksOff();
          });
    } catch (const BreaksOff&) {
    }
    return made / "backup";
  }();
  return folder;
}

void run(unsigned seed, bool is_apart = false) {
  auto drawn = draw(seed, is_apart);
  SCOPED_TRACE(testing::Message() << "LOCKSTEP_SEED=" << seed << ": " << drawn.described);
  drawn.program.folder = fresh_folder("simulated_fits", "drawn");
  if (drawn.program.goes_on) {
    std::filesystem::copy(broken_off(), drawn.program.folder / "backup");
    std::filesystem::copy(broken_off().parent_path() / "epoch-1.safetensors", drawn.program.folder);
  }
  simulated::Job job(seed, drawn.fates);
  std::map<int, Outcome> outcomes;
  std::mutex mutex;
  strategy::StrategySettings settings{.gradients = {.shard_state = drawn.program.shards}};
  settings.workers = strategy::WorkerSettings{.elastic = ElasticOptions{.join_seconds = 5}};
  if (is_apart) {
    settings.gradients.diloco = DiLoCoOptions{.steps = 2};
    settings.workers->per_group = 1;
  }
  const auto errors = job.run(settings, [&](int worker, const Strategy& strategy) {
    const auto scope = strategy.scope();
    auto outcome = train(drawn.program, worker, [&] { job.begin_to_count(worker); });
    const std::lock_guard lock(mutex);
    outcomes[worker] = std::move(outcome);
  });
  EXPECT_EQ(job.problem(), "");
  const Outcome* first = nullptr;
  for (std::size_t i = 0; i < errors.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "worker " << i);
    const int worker = static_cast<int>(i);
    const bool may_leave = drawn.program.told_to_leave.contains(worker);
    if (drawn.fates[i].lost_at > 0 && errors[i] == "lost") continue;
    if (may_leave && errors[i].find("interrupted by Terminated") != std::string::npos) continue;
    EXPECT_EQ(errors[i], "");
    if (!outcomes.contains(worker)) continue;
    const auto& outcome = outcomes.at(worker);
    if (outcome.losses.size() < alone().outcome.losses.size()) continue;  // a newcomer after the first training
    if (!is_apart) expect_as_alone(outcome, std::count(errors.begin(), errors.end(), "lost") == 0);
    if (first == nullptr) first = &outcome;
    EXPECT_EQ(outcome.evaluated, first->evaluated);
    EXPECT_TRUE(equal_bits(outcome.weights, first->weights));
    EXPECT_EQ(outcome.losses, first->losses);
  }
  EXPECT_NE(first, nullptr);
  const bool changes = !drawn.program.told_to_leave.empty() ||
                       std::any_of(drawn.fates.begin(), drawn.fates.end(),
                                   [](const auto& fate) { return fate.lost_at > 0 || fate.begins_after > 0; });
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    const auto name = text("epoch-", epoch, ".safetensors");
    EXPECT_TRUE(std::filesystem::exists(drawn.program.folder / name)) << name;
    if (first == nullptr || !std::filesystem::exists(drawn.program.folder / name)) continue;
    // A file that was being written when the workers changed is of a later step.
    if ((drawn.program.in_background && changes) || is_apart) continue;
    EXPECT_LE(largest_difference(weights_in(drawn.program.folder / name, first->weights),
                                 weights_in(alone().folder / name, first->weights)),
              kNear)
        << name;
  }
}

void run_all(bool is_apart) {
  const char* const programs = std::getenv("LOCKSTEP_PROGRAMS");
  const char* const seed = std::getenv("LOCKSTEP_SEED");
  if (seed != nullptr) return run(static_cast<unsigned>(std::stoul(seed)), is_apart);
  for (int i = 0; i < (programs == nullptr ? 40 : std::atoi(programs)) && !testing::Test::HasFailure(); ++i)
    run(static_cast<unsigned>(i), is_apart);
}

TEST(SimulatedFits, AsOneProcessWhoeverIsLostLeavesOrComes) { run_all(/*is_apart=*/false); }

// Values and logs are the same on all that remain, also where workers differ between meetings.
TEST(SimulatedFits, WorkersApartComeTogetherWhoeverIsLostLeavesOrComes) { run_all(/*is_apart=*/true); }

}  // namespace
}  // namespace lockstep
