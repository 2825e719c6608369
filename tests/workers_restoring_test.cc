// Tests what several workers keep and repeat: checkpoints on another number of workers or replicas, two runs that are
// equal, and how often copies are compared.
#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "base/text.h"
#include "strategy/unwrap.h"
#include "tests/fails_after.h"
#include "tests/workers.h"
#include "train/model_impl.h"

namespace lockstep {
namespace {

constexpr int kBatches = 4;  // of make_data's 26 examples in an epoch

// Two epochs, or until `stop_after` batches of the first, from the checkpoint `initial`.
std::vector<Tensor> train(const Strategy& strategy, const Dataset& data, const std::string& initial,
                          const std::string& backup, std::int64_t stop_after = kBatches) {
  const auto scope = strategy.scope();
  auto model = make_model(at::kDouble, Adam({.learning_rate = 0.01}));
  model.load_checkpoint(initial);
  std::vector<AnyCallback> callbacks{BackupAndRestore(backup, {.save_freq = 1, .delete_checkpoint = false})};
  if (stop_after < kBatches) callbacks.emplace_back(FailsAfter(stop_after));
  model.fit(data, {.epochs = 2, .verbose = 0, .callbacks = callbacks});
  EXPECT_EQ(model.iterations(), 2 * kBatches);
  return weights_of(model);
}

// The weights at the end of a training that never stopped, on any number of workers and replicas, are those of one.
TEST(WorkersRestore, OnOtherNumbersOfWorkersAndReplicas) {
  const auto folder = fresh_folder("workers_restoring", "numbers");
  const auto initial = (folder / "initial").string();
  make_model(at::kDouble, Adam({.learning_rate = 0.01})).save_checkpoint(initial);
  const auto data = make_data(at::kDouble).shuffle(26, {.seed = 3}).batch(7);
  const auto expected = train(OneDeviceStrategy(), data, initial, (folder / "whole").string());
  struct Size {
    int workers, replicas;
    bool sharded = false;  // optimizer state
    WorkerOptions options() const {
      return {.workers = workers, .replicas = replicas, .shard_optimizer_state = sharded};
    }
  };
  for (const auto& [before, after] : std::vector<std::pair<Size, Size>>{{{2, 1}, {3, 1}},
                                                                        {{3, 2}, {1, 1}},
                                                                        {{1, 2}, {2, 2}},
                                                                        {{4, 1}, {3, 1}},
                                                                        {{4, 1}, {5, 1}},
                                                                        {{2, 2}, {2, 1}},
                                                                        {{2, 1, true}, {3, 1, true}},
                                                                        {{4, 2, true}, {1, 1}},
                                                                        {{2, 1}, {2, 2, true}},
                                                                        {{3, 1, true}, {2, 1}}}) {
    const auto name = text(before.workers, " x ", before.replicas, before.sharded ? " sharded" : "", ", then ",
                           after.workers, " x ", after.replicas, after.sharded ? " sharded" : "");
    const auto backup = (folder / name).string();
    const auto stopped =
        run_workers(before.options(), [&](const auto& strategy) { train(strategy, data, initial, backup, 2); });
    for (const auto& error : stopped) EXPECT_NE(error.find("stop here"), std::string::npos) << error;
    expect_no_errors(run_workers(after.options(), [&](const auto& strategy) {
      EXPECT_LE(largest_difference(train(strategy, data, initial, backup), expected), 1e-9) << name;
    }));
  }
}

// Each worker as if on a host of its own: all that they share goes over TCP.
TEST(WorkersRepeat, TwoRunsOfThreeOverTcpAreEqualBitForBit) {
  const auto initial = (fresh_folder("workers_restoring", "repeat") / "initial").string();
  const auto make = [] {
    Sequential model({Dense(32, {.activation = "relu"}), Dropout(0.4), Dense(3)});
    model.compile({.optimizer = Adam(), .loss = SparseCategoricalCrossentropy({.from_logits = true})});
    model.build({6});
    return model;
  };
  make().save_checkpoint(initial);
  const auto data = make_data(at::kFloat).shuffle(26, {.seed = 3}).batch(7);
  const auto run = [&] {
    Collected<std::vector<Tensor>> weights;
    expect_no_errors(run_workers({.workers = 3, .replicas = 2, .hosts_differ = true}, [&](const auto& strategy) {
      const auto scope = strategy.scope();
      auto model = make();
      model.load_checkpoint(initial);
      model.fit(data, {.epochs = 3, .verbose = 0});
      weights.add(strategy, weights_of(model));
    }));
    EXPECT_EQ(weights.values().size(), 3U);
    for (const auto& [rank, own] : weights.values()) EXPECT_TRUE(equal_bits(own, weights.chiefs())) << rank;
    return weights.chiefs();
  };
  EXPECT_TRUE(equal_bits(run(), run()));
}

TEST(WorkersCompare, TheirCopiesEverySoManyStepsOrNever) {
  constexpr std::int64_t kDifferAfter = 11, kSteps = 40;
  const auto data = make_data(at::kDouble).batch(7).repeat();
  for (const std::int64_t every : {std::int64_t{0}, std::int64_t{1}, std::int64_t{8}}) {
    Collected<std::int64_t> steps;
    const auto errors = run_workers(
        {.workers = 2},
        [&](const MultiWorkerMirroredStrategy& strategy) {
          const auto scope = strategy.scope();
          auto model = make_model(at::kDouble, SGD());
          LambdaCallback::Functions functions;
          functions.on_train_batch_end = [&](std::int64_t batch, const Logs&) {
            if (batch + 1 == kDifferAfter && strategy.worker_rank() == 1) {
              const at::NoGradGuard no_grad;
              unwrap(model.module()).parameter(0, 2).add_(1e-9);
            }
            steps.add(strategy, batch + 1);
          };
          model.fit(data, {.verbose = 0, .callbacks = {LambdaCallback(functions)}, .steps_per_epoch = kSteps});
        },
        every);
    for (const auto& error : errors) {
      expect_says(error, every == 0 ? "" : "the workers' copies differ");
      EXPECT_EQ(error.empty(), every == 0);
    }
    // The comparison is part of the first step whose number is a multiple.
    const auto last = every == 0 ? kSteps : kDifferAfter / every * every + every - 1;
    for (const auto& [rank, count] : steps.values()) EXPECT_EQ(count, last) << rank << ", every " << every;
  }
}

// Alters the memory of worker `victim` between two steps, or that of worker 0's optimizer.
TEST(WorkersCompare, ThoseThatDifferGetWhatMostHave) {
  constexpr std::int64_t kDifferAfter = 11, kSteps = 40;
  const auto data = make_data(at::kDouble).batch(7).repeat();
  const auto initial = (fresh_folder("workers_restoring", "differ") / "initial").string();
  make_model(at::kDouble, Adam()).save_checkpoint(initial);
  const auto train = [&](int victim, bool in_optimizer, int workers) {
    Collected<std::vector<Tensor>> weights;
    const auto body = [&](const MultiWorkerMirroredStrategy& strategy) {
      const auto scope = strategy.scope();
      auto model = make_model(at::kDouble, Adam());
      model.load_checkpoint(initial);
      const auto alter = [&](std::int64_t batch, const Logs&) {
        if (batch + 1 != kDifferAfter || strategy.worker_rank() != victim) return;
        const at::NoGradGuard no_grad;
        in_optimizer ? unwrap(model).gradients->updater().state(2, 0).add_(1e-9)
                     : unwrap(model.module()).parameter(0, 2).add_(1e-9);
      };
      model.fit(
          data,
          {.verbose = 0, .callbacks = {LambdaCallback({.on_train_batch_end = alter})}, .steps_per_epoch = kSteps});
      weights.add(strategy, {unwrap(model.module()).parameter(0, 2).clone(),
                             unwrap(model).gradients->updater().state(2, 0).clone()});
    };
    const auto errors = run_workers({.workers = workers, .replace_differing_copies = true}, body, 1);
    return std::pair(errors, weights.values());
  };
  const auto undisturbed = train(-1, false, 3).second.at(0);
  for (const auto& [victim, in_optimizer] : {std::pair(0, false), std::pair(2, false), std::pair(0, true)}) {
    SCOPED_TRACE(testing::Message() << victim << in_optimizer);
    const auto [errors, all] = train(victim, in_optimizer, 3);
    expect_no_errors(errors);
    for (const auto& [rank, theirs] : all) {
      for (std::size_t i = 0; i < theirs.size(); ++i) {
        EXPECT_TRUE(at::equal(theirs[i], all.at(0)[i])) << rank;
        EXPECT_LE((theirs[i] - undisturbed[i]).abs().max().item<double>(), 1e-9) << rank;
      }
    }
  }
  for (const auto& error : train(0, false, 2).first) expect_says(error, "the workers' copies differ");  // no majority
}

}  // namespace
}  // namespace lockstep
