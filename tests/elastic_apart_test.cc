// Workers of an elastic job that train by themselves (DiLoCo), and are lost or come at a known moment
// (tests/simulated_workers.h): against a plain loop.
#include <lockstep/lockstep.h>

#include <cmath>
#include <condition_variable>

#include "base/text.h"
#include "tests/plain_groups.h"
#include "tests/simulated_workers.h"
#include "train/signal_guard.h"

namespace lockstep {
namespace {

constexpr int kEpochsOfApart = 3;
constexpr int kStepsOfApart = 4;  // of an epoch
constexpr double kNearApart = 1e-9;
const DiLoCoOptions kEveryThird{.steps = 3};  // steps 2, 3 (an epoch's end), 6, 7, ...

Optimizer sgd_apart() { return SGD({.learning_rate = 0.1, .momentum = 0.5}); }

// Functions that are called before a worker's step, and after it. Steps are numbered over all epochs.
struct Happens {
  std::function<void(int worker, int step)> before = [](int, int) {}, after = [](int, int) {};
};

// A fit of simulated workers. Its results: values, by worker; and a newcomer's first step.
struct Apart {
  simulated::Job job;
  const std::string initial = saved_initial("elastic_apart");
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, std::vector<Tensor>> values;
  std::map<int, int> begun;   // [worker]: the last step that it has begun
  std::map<int, int> joined;  // [newcomer]: its first step

  Apart(unsigned seed, const std::vector<simulated::Fate>& fates) : job(seed, fates) {}

  std::vector<std::string> run(const DiLoCoOptions& options, const Optimizer& optimizer, const Happens& happens) {
    strategy::StrategySettings settings{.gradients = {.diloco = options}};
    settings.workers = strategy::WorkerSettings{.elastic = ElasticOptions{.join_seconds = 5}, .per_group = 1};
    return job.run(settings, [&](int worker, const Strategy& strategy) {
      const auto scope = strategy.scope();
      auto model = make_model(at::kDouble, optimizer);
      model.load_weights(initial);
      int epoch = 0;
      const LambdaCallback callback({.on_train_begin = [&] { job.begin_to_count(worker); },
                                     .on_epoch_begin = [&](int number) { epoch = number; },
                                     .on_train_batch_begin =
                                         [&](std::int64_t batch) {
                                           const int step = epoch * kStepsOfApart + static_cast<int>(batch);
                                           begin(worker, step);
                                           happens.before(worker, step);
                                         },
                                     .on_train_batch_end =
                                         [&](std::int64_t batch, const Logs&) {
                                           happens.after(worker, epoch * kStepsOfApart + static_cast<int>(batch));
                                         }});
      model.fit(examples_of_all(),
                {.epochs = kEpochsOfApart, .verbose = 0, .callbacks = {callback}, .handle_signals = false});
      const std::lock_guard lock(mutex);
      values[worker] = weights_of(model);
    });
  }

  // Waits until these workers are in that step: then all have completed the one before.
  void wait_until_begun(const std::vector<int>& workers, int step) {
    std::unique_lock lock(mutex);
    const bool begun_by_all = changed.wait_for(lock, std::chrono::seconds(60), [&] {
      return std::all_of(workers.begin(), workers.end(),
                         [&](int worker) { return begun.contains(worker) && begun[worker] >= step; });
    });
    EXPECT_TRUE(begun_by_all) << "step " << step;
  }

  // Expects the same values on all workers that are left: those of one of the loops.
  void expect_values(const std::vector<std::string>& errors, const std::vector<int>& lost,
                     const std::vector<PlainGroups>& loops) {
    EXPECT_EQ(job.problem(), "");
    double nearest = INFINITY;
    for (std::size_t i = 0; i < errors.size(); ++i) {
      const int worker = static_cast<int>(i);
      const bool is_lost = std::find(lost.begin(), lost.end(), worker) != lost.end();
      EXPECT_EQ(errors[i], is_lost ? "lost" : "") << "worker " << worker;
      if (is_lost) continue;
      ASSERT_TRUE(values.contains(worker)) << "worker " << worker;
      EXPECT_TRUE(equal_bits(values.at(worker), values.rbegin()->second)) << "worker " << worker;
    }
    for (const auto& loop : loops) {
      nearest = std::min(nearest, largest_difference(values.begin()->second, loop.values()));
    }
    EXPECT_LE(nearest, kNearApart);
  }

 private:
  void begin(int worker, int step) {
    const std::lock_guard lock(mutex);
    begun[worker] = step;
    joined.try_emplace(worker, step);
    changed.notify_all();
  }
};

std::vector<int> others_than(int victim) {
  std::vector<int> others;
  for (int worker = 0; worker < 3; ++worker) {
    if (worker != victim) others.push_back(worker);
  }
  return others;
}

// A fit of three workers, one of whom is lost in a step. `counts`: that step's meeting has its part. `left_out`: the
// worker that makes no such step, because it had not completed the one before; -1: none.
PlainGroups plain_with_loss(const Apart& apart, const Optimizer& optimizer, int victim, int at, bool counts = false,
                            int left_out = -1) {
  PlainGroups plain(3, 3, kEveryThird, apart.initial, optimizer);
  if (left_out >= 0) plain.leave_out(at, left_out);
  const auto after = [&](int step) {
    if (step != at) return;
    if (counts) plain.meet();
    plain.lose(victim);
    plain.meet();
  };
  for (int epoch = 0; epoch < kEpochsOfApart; ++epoch) plain.train_epoch(after);
  return plain;
}

// Between two meetings, in the first step after one, and in a step with a meeting: of this, and of an epoch's end. What
// the worker has done since its last meeting is lost with it.
TEST(ElasticApart, AWorkerIsLostInAStep) {
  for (const auto& optimizer : {sgd_apart(), adam_of_groups()}) {
    for (int at = 0; at < 2 * kStepsOfApart; ++at) {
      const int victim = at % 3;
      SCOPED_TRACE(text(optimizer.rule().name(), ", worker ", victim, " in step ", at));
      Apart apart(static_cast<unsigned>(at), {{}, {}, {}});
      const auto errors = apart.run(kEveryThird, optimizer, {.before = [&](int worker, int step) {
                                      if (worker != victim || step != at) return;
                                      apart.wait_until_begun(others_than(victim), at);
                                      apart.job.lose(worker, 0);
                                    }});
      apart.expect_values(errors, {victim}, {plain_with_loss(apart, optimizer, victim, at)});
    }
  }
}

// Before the first operation of a meeting nobody can complete the meeting. Later some may have completed it, or not:
// then all have its result, or none.
TEST(ElasticApart, AWorkerIsLostInAMeeting) {
  constexpr int kMeets = 2;
  for (unsigned seed = 0; seed < 30; ++seed) {
    const int victim = static_cast<int>(seed % 3), places = 1 + static_cast<int>(seed / 3 % 3);
    SCOPED_TRACE(text("worker ", victim, " at its place ", places, ", seed ", seed));
    Apart apart(seed, {{}, {}, {}});
    const auto errors = apart.run(kEveryThird, adam_of_groups(), {.before = [&](int worker, int step) {
                                    if (worker != victim || step != kMeets) return;
                                    apart.wait_until_begun(others_than(victim), kMeets);
                                    apart.job.lose(worker, places);
                                  }});
    std::vector<PlainGroups> loops{plain_with_loss(apart, adam_of_groups(), victim, kMeets)};
    if (places > 1) loops.push_back(plain_with_loss(apart, adam_of_groups(), victim, kMeets, /*counts=*/true));
    apart.expect_values(errors, {victim}, loops);
  }
}

// After the last operation of a step some may have completed the step, and made the next one. The others leave that one
// out.
TEST(ElasticApart, AWorkerIsLostBetweenTwoSteps) {
  constexpr int kAt = 5;
  for (unsigned seed = 0; seed < 30; ++seed) {
    const int victim = static_cast<int>(seed % 3);
    SCOPED_TRACE(text("worker ", victim, ", seed ", seed));
    Apart apart(seed, {{}, {}, {}});
    const auto errors = apart.run(kEveryThird, adam_of_groups(), {.before = [&](int worker, int step) {
                                    if (worker == victim && step == kAt) apart.job.lose(worker, 2);
                                  }});
    const auto others = others_than(victim);
    std::vector<PlainGroups> loops{
        plain_with_loss(apart, adam_of_groups(), victim, kAt),  // nobody has completed the step without the victim
        plain_with_loss(apart, adam_of_groups(), victim, kAt + 1)};
    for (const int left_out : others)
      loops.push_back(plain_with_loss(apart, adam_of_groups(), victim, kAt + 1, /*counts=*/false, left_out));
    apart.expect_values(errors, {victim}, loops);
  }
}

// After the last step of an epoch, when all bring their variables together.
TEST(ElasticApart, AWorkerIsLostAtTheEndOfAnEpoch) {
  constexpr int kLast = kStepsOfApart - 1;
  for (const int victim : {0, 2}) {
    for (const int places : {0, 1, 2, 3, 4, 5}) {
      SCOPED_TRACE(text("worker ", victim, " at its place ", places));
      Apart apart(static_cast<unsigned>(places), {{}, {}, {}});
      const auto errors = apart.run(kEveryThird, adam_of_groups(), {.after = [&](int worker, int step) {
                                      if (worker == victim && step == kLast) apart.job.lose(worker, places);
                                    }});
      std::vector<PlainGroups> loops{plain_with_loss(apart, adam_of_groups(), victim, kLast)};
      if (places > 1) loops.push_back(plain_with_loss(apart, adam_of_groups(), victim, kLast, /*counts=*/true));
      apart.expect_values(errors, {victim}, loops);
    }
  }
}

// All bring their variables together then. The newcomer goes on with the first worker's state of Adam.
TEST(ElasticApart, ANewcomerIsTakenIn) {
  constexpr int kLater = 1 << 30;
  for (const auto& optimizer : {sgd_apart(), adam_of_groups()}) {
    for (int at = 0; at < 2 * kStepsOfApart; ++at) {
      SCOPED_TRACE(text(optimizer.rule().name(), ", after step ", at));
      Apart apart(static_cast<unsigned>(at), {{}, {}, {.begins_after = kLater}});
      const auto errors = apart.run(kEveryThird, optimizer, {.before = [&](int worker, int step) {
                                      if (worker == 0 && step == at) apart.job.call_newcomer(2);
                                    }});
      EXPECT_EQ(apart.joined[2], at + 1);
      PlainGroups plain(2, 2, kEveryThird, apart.initial, optimizer);
      for (int epoch = 0; epoch < kEpochsOfApart; ++epoch) {
        plain.train_epoch([&](int step) {
          if (step != at) return;
          plain.meet();
          plain.add();
        });
      }
      apart.expect_values(errors, {}, {plain});
    }
  }
}

// Nothing that the worker has done is lost.
TEST(ElasticApart, AWorkerThatIsToldToEndMeetsTheOthersAndLeaves) {
  constexpr int kAt = 4, kLeaves = 1;
  Apart apart(0, {{}, {}, {}});
  auto errors = apart.run(kEveryThird, adam_of_groups(), {.before = [&](int worker, int step) {
                            if (step == 0) train::SignalGuard::of_thread = 0;
                            if (worker == kLeaves && step == kAt) train::SignalGuard::of_thread = SIGTERM;
                          }});
  EXPECT_NE(errors[kLeaves].find("interrupted by Terminated"), std::string::npos) << errors[kLeaves];
  errors[kLeaves] = "lost";
  apart.expect_values(errors, {kLeaves}, {plain_with_loss(apart, adam_of_groups(), kLeaves, kAt, /*counts=*/true)});
}

}  // namespace
}  // namespace lockstep
