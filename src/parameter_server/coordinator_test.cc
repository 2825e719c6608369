#include "parameter_server/coordinator.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/expect_says_testing.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {
namespace {

using Kind = Assignment::Kind;

Deadline now() { return Deadline::after(std::chrono::seconds(0)); }

// The workers connect.
void join_workers(Coordinator& chief, int workers) {
  for (int worker = 0; worker < workers; ++worker) chief.join({text("worker ", worker), worker});
}

std::vector<double> results_of(Coordinator& chief) { return chief.wait_for_step(now())->results; }

Report finished(std::int64_t step, std::vector<double> results = {1}, int part = 0) {
  return {.kind = Report::Kind::finished, .task = {step, part}, .chief = 1, .results = std::move(results)};
}

Assignment given(std::int64_t step, std::int64_t epoch, std::int64_t index, int part = 0) {
  return {.kind = Kind::task, .task = {step, part}, .epoch = epoch, .index = index, .chief = 1};
}

// Returns the assignment without its count of finished steps.
Assignment place_of(Assignment assignment) {
  assignment.finished = 0;
  return assignment;
}

TEST(Coordinator, WorkersGetStepsWithThePlacesOfTheirBatches) {
  Coordinator chief(2, 60);
  join_workers(chief, 2);
  EXPECT_EQ(chief.next(0, 0, {}, now()).kind, Kind::wait);  // no fit yet
  chief.begin(0, 0, {});
  chief.open(0, 0, 2);
  EXPECT_EQ(place_of(chief.next(0, 0, {}, now())), given(0, 0, 0));
  EXPECT_EQ(place_of(chief.next(0, 1, {}, now())), given(1, 0, 1));
  EXPECT_EQ(chief.next(1, 1, {}, now()).kind, Kind::wait);  // a later call
  EXPECT_EQ(chief.next(0, 1, finished(1, {5, 7}), now()).kind, Kind::wait);
  EXPECT_EQ(results_of(chief), (std::vector<double>{5, 7}));
  EXPECT_THROW(chief.wait_for_step(now()), DeadlineExceeded);
  EXPECT_EQ(chief.next(0, 0, finished(0), now()).kind, Kind::wait);
  EXPECT_EQ(results_of(chief), std::vector<double>{1});
  EXPECT_FALSE(chief.wait_for_step(now()));
  chief.set_learning_rate(0.5);
  chief.open(1, 0, 1);  // the next epoch
  auto expected = given(2, 1, 0);
  expected.learning_rate = 0.5;
  EXPECT_EQ(place_of(chief.next(0, 0, {}, now())), expected);
  EXPECT_EQ(chief.outcome(0, now()), std::nullopt);
  chief.end(0, "result");
  EXPECT_EQ(chief.next(0, 0, finished(2), now()).kind, Kind::over);
  EXPECT_EQ(chief.outcome(0, now()), "result");
}

TEST(Coordinator, DataOfUnknownLengthEndWhereAWorkerFindsNoBatch) {
  Coordinator chief(2, 60);
  join_workers(chief, 2);
  chief.begin(0, 0, {});
  chief.open(0, 0, -1);
  chief.next(0, 0, {}, now());
  chief.next(0, 1, {}, now());
  EXPECT_EQ(place_of(chief.next(0, 0, finished(0), now())), given(2, 0, 2));
  EXPECT_EQ(place_of(chief.next(0, 1, finished(1), now())), given(3, 0, 3));
  const auto no_batch = [](std::int64_t step) {
    return Report{.kind = Report::Kind::no_batch, .task = {step}, .chief = 1};
  };
  EXPECT_EQ(chief.next(0, 1, no_batch(3), now()).kind, Kind::wait);
  EXPECT_EQ(chief.next(0, 0, no_batch(2), now()).kind, Kind::wait);
  EXPECT_TRUE(chief.wait_for_step(now()));
  EXPECT_TRUE(chief.wait_for_step(now()));
  EXPECT_FALSE(chief.wait_for_step(now()));
  chief.open(1, 0, -1);
  EXPECT_EQ(place_of(chief.next(0, 0, {}, now())), given(2, 1, 0));  // the numbers are used again
}

TEST(Coordinator, ALateEndOfDataEndsNotTheNextEpoch) {
  Coordinator chief(2, 60);
  join_workers(chief, 2);
  const auto no_batch = [](std::int64_t step) {
    return Report{.kind = Report::Kind::no_batch, .task = {step}, .chief = 1};
  };
  chief.begin(0, 0, {});
  chief.open(0, 0, -1);
  chief.next(0, 0, {}, now());
  chief.next(0, 1, {}, now());
  chief.next(0, 0, finished(0), now());  // gets step 2
  EXPECT_EQ(chief.next(0, 1, no_batch(1), now()).kind, Kind::wait);
  EXPECT_TRUE(chief.wait_for_step(now()));
  EXPECT_FALSE(chief.wait_for_step(now()));
  chief.open(1, 0, -1);
  EXPECT_EQ(place_of(chief.next(0, 1, {}, now())), given(1, 1, 0));
  EXPECT_EQ(place_of(chief.next(0, 0, no_batch(2), now())), given(2, 1, 1));  // of the epoch before
}

TEST(Coordinator, StopLetsBegunStepsFinish) {
  Coordinator chief(3, 60);
  join_workers(chief, 3);
  chief.begin(0, 0, {});
  chief.open(0, 0, 100);
  for (int worker = 0; worker < 3; ++worker) chief.next(0, worker, {}, now());
  chief.leave({"worker 1", 1});  // its step is nobody's now, and lies before one that is somebody's
  chief.stop();
  EXPECT_EQ(place_of(chief.next(0, 0, finished(0), now())), given(1, 0, 1));
  EXPECT_EQ(chief.next(0, 2, finished(2), now()).kind, Kind::wait);
  EXPECT_EQ(chief.next(0, 0, finished(1), now()).kind, Kind::wait);
  for (int step = 0; step < 3; ++step) EXPECT_TRUE(chief.wait_for_step(now()));
  EXPECT_FALSE(chief.wait_for_step(now()));
}

TEST(Coordinator, PartsOfAStepAreAddedInTheirOrder) {
  Coordinator chief(2, 60);
  join_workers(chief, 2);
  chief.begin(0, 0, {.parts = 2, .needed = 2});
  chief.open(0, 0, 1);
  EXPECT_EQ(place_of(chief.next(0, 1, {}, now())), given(0, 0, 0, 0));
  EXPECT_EQ(place_of(chief.next(0, 0, {}, now())), given(0, 0, 0, 1));
  chief.next(0, 0, finished(0, {1e-20, 3}, 1), now());
  EXPECT_THROW(chief.wait_for_step(now()), DeadlineExceeded);
  chief.next(0, 1, finished(0, {1, 2}, 0), now());
  EXPECT_EQ(results_of(chief), (std::vector<double>{1 + 1e-20, 5}));
}

TEST(Coordinator, AFailedStepFailsTheFitWithItsText) {
  Coordinator chief(2, 60);
  join_workers(chief, 2);
  chief.begin(0, 0, {});
  chief.open(0, 0, 5);
  chief.next(0, 1, {}, now());
  chief.next(0, 1, Report{.kind = Report::Kind::failed, .task = {0}, .error = "no such image"}, now());
  expect_says(message_of<InvalidArgument>([&] { chief.wait_for_step(now()); }), "worker 1: no such image");
}

TEST(Coordinator, AStepThatReachedSomeServersIsGivenAgain) {
  Coordinator chief(1, 60);
  join_workers(chief, 1);
  chief.begin(0, 0, {});
  chief.open(0, 0, 2);
  const Report incomplete{.kind = Report::Kind::incomplete, .task = {0}, .chief = 1, .error = "ps 1 does not answer"};
  EXPECT_EQ(place_of(chief.next(0, 0, {}, now())), given(0, 0, 0));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(place_of(chief.next(0, 0, incomplete, now())), given(0, 0, 0));
  chief.next(0, 0, incomplete, now());
  expect_says(message_of<InvalidArgument>([&] { chief.wait_for_step(now()); }), "worker 0: ps 1 does not answer");
}

// Servers may then forget which of them they have.
TEST(Coordinator, SaysWhichStepsHaveAllFinished) {
  Coordinator chief(2, 60);
  join_workers(chief, 2);
  chief.begin(0, 0, {});
  chief.open(0, 0, 9);
  for (const int worker : {0, 1}) EXPECT_EQ(chief.next(0, worker, {}, now()).finished, 0);
  EXPECT_EQ(chief.next(0, 1, finished(1), now()).finished, 0);
  EXPECT_EQ(chief.next(0, 0, finished(0), now()).finished, 2);
}

// Reports steps that were given out before the chief restored a checkpoint.
TEST(Coordinator, AReportOfTheTimeBeforeARestoreIsIgnored) {
  Coordinator chief(1, 60);
  join_workers(chief, 1);
  chief.begin(0, 0, {});
  chief.open(0, 0, 2);
  chief.next(0, 0, {}, now());
  chief.set_chief(2);
  auto late = finished(0);
  EXPECT_EQ(chief.next(0, 0, late, now()).chief, 2);
  EXPECT_THROW(chief.wait_for_step(now()), DeadlineExceeded);
  late.chief = 2;
  chief.next(0, 0, late, now());
  EXPECT_TRUE(chief.wait_for_step(now()));
}

// By both numbers a worker knows whether a task is of the state that it has.
TEST(Coordinator, TellsWhoseStateItGivesAndAfterHowManyChanges) {
  Coordinator chief(1, 60, /*chief=*/3);
  chief.begin(0, 0, {}, "plan", "first\nstate");
  const auto started = [&] { return ChiefState::parse(chief.start(0, 0, "plan", now()).value()); };
  EXPECT_EQ(started().chief, 3);
  EXPECT_EQ(started().changes, 0);
  EXPECT_EQ(started().values, "first\nstate");
  chief.change_state("");
  chief.set_chief(4);
  EXPECT_EQ(started().chief, 4);
  EXPECT_EQ(started().changes, 1);
  EXPECT_EQ(started().values, "");
  chief.end(0, "result");
  EXPECT_EQ(chief.start(0, 0, "plan", now()), "");
  for (const char* const other : {"", "3", "3 1", "3\n", "a 1\n", "3 1 2\nvalues"})
    EXPECT_THROW(ChiefState::parse(other), DataError) << other;
}

TEST(Coordinator, ModelsHaveStepsOfTheirOwn) {
  Coordinator chief(1, 60);
  join_workers(chief, 1);
  for (const std::int64_t model : {0, 1}) {
    chief.begin(model, model, {});
    chief.open(0, 0, 2);
    EXPECT_EQ(place_of(chief.next(model, 0, {}, now())), given(0, 0, 0));
    EXPECT_EQ(place_of(chief.next(model, 0, finished(0), now())), given(1, 0, 1));
    chief.next(model, 0, finished(1), now());
    chief.end(model, "");
  }
  chief.begin(2, 0, {});
  chief.open(7, 3, 1);
  EXPECT_EQ(place_of(chief.next(2, 0, {}, now())), given(2, 7, 3));
}

TEST(Coordinator, WhoAsksMustBeAWorker) {
  Coordinator chief(2, 60);
  join_workers(chief, 2);
  expect_says(message_of<InvalidArgument>([&] { chief.next(0, 2, {}, now()); }), "worker 2");
}

TEST(Coordinator, AFitWithoutWorkersEnds) {
  Coordinator chief(1, 0.05);
  chief.begin(0, 0, {});
  chief.open(0, 0, 1);
  const auto soon = Deadline::after(std::chrono::seconds(10));
  expect_says(message_of<ClusterError>([&] { chief.wait_for_step(soon); }), "all workers are lost");
  chief.join({"worker 0", 0});
  EXPECT_THROW(chief.wait_for_step(now()), DeadlineExceeded);
  chief.leave({"worker 0", 0});
  expect_says(message_of<ClusterError>([&] { chief.wait_for_step(soon); }), "none has connected again for 0.05 s");
}

TEST(Coordinator, AFailureBeforeTheFitFailsIt) {
  Coordinator chief(1, 60);
  join_workers(chief, 1);
  std::jthread worker([&] {
    const Report report{.kind = Report::Kind::failed, .error = "no such file"};
    EXPECT_EQ(chief.next(0, 0, report, Deadline::after(std::chrono::seconds(10))).kind, Kind::over);
  });
  chief.begin(0, 0, {});
  chief.open(0, 0, 1);
  expect_says(message_of<InvalidArgument>([&] { chief.wait_for_step(Deadline::after(std::chrono::seconds(10))); }),
              "worker 0: no such file");
}

TEST(Coordinator, KnowsWhoHasLeft) {
  Coordinator chief(1, 60);
  join_workers(chief, 1);
  chief.join({"ps 0"});
  EXPECT_FALSE(chief.wait_for_leaving("ps", now()));
  chief.leave({"worker 0", 0});
  EXPECT_TRUE(chief.wait_for_leaving("ps", now()));
  EXPECT_FALSE(chief.wait_for_leaving("", now()));
}

TEST(Coordinator, ACheckpointHasTheStepsThatWorkersHadBegun) {
  Coordinator chief(2, 60);
  join_workers(chief, 2);
  chief.begin(0, 0, {});
  chief.open(0, 0, 9);
  EXPECT_EQ(place_of(chief.next(0, 0, {}, now())), given(0, 0, 0));
  EXPECT_EQ(place_of(chief.next(0, 1, {}, now())), given(1, 0, 1));
  EXPECT_EQ(chief.hold(0), 2);
  EXPECT_EQ(chief.next(0, 1, finished(1, {5}), now()).kind, Kind::wait);
  EXPECT_EQ(chief.hold(1), 0);  // a model without a fit
  chief.release();
  EXPECT_EQ(place_of(chief.next(0, 1, {}, now())), given(2, 0, 2));
  EXPECT_EQ(place_of(chief.next(0, 1, finished(2, {6}), now())), given(3, 0, 3));
  EXPECT_THROW(chief.wait_for_begun(0, 2, now()), DeadlineExceeded);
  EXPECT_EQ(results_of(chief), std::vector<double>{5});  // counted before the checkpoint
  chief.next(0, 0, finished(0, {4}), now());
  const auto steps = chief.wait_for_begun(0, 2, now());
  EXPECT_EQ(steps.end, 2);
  EXPECT_EQ(steps.uncounted, (std::vector<std::vector<double>>{{4}}));  // not step 2

  // Another chief goes on from there.
  Coordinator next(2, 60, 2);
  join_workers(next, 2);
  EXPECT_FALSE(next.knows(0));
  next.resume(0, {}, steps.end);
  EXPECT_TRUE(next.knows(0));
  next.begin(0, 0, {}, "", "", steps.uncounted);
  EXPECT_EQ(next.next(0, 1, finished(3), now()).kind, Kind::wait);  // of the chief before: it is made again
  next.open(0, 2, 7);
  EXPECT_EQ(results_of(next), std::vector<double>{4});
  auto expected = given(2, 0, 2);
  expected.chief = 2;
  EXPECT_EQ(place_of(next.next(0, 0, {}, now())), expected);
  next.next(0, 1, finished(2), now());  // again of the chief before
  EXPECT_THROW(next.wait_for_step(now()), DeadlineExceeded);
  EXPECT_THROW(next.resume(0, {}, 1), InvalidArgument);  // a step is being computed
}

TEST(Coordinator, ACheckpointWaitsForNoBatchThatTheDataDoNotHave) {
  Coordinator chief(1, 60);
  join_workers(chief, 1);
  chief.begin(0, 0, {});
  chief.open(0, 0, -1);
  chief.next(0, 0, {}, now());
  chief.next(0, 0, finished(0), now());
  EXPECT_EQ(chief.hold(0), 2);
  chief.release();
  chief.next(0, 0, Report{.kind = Report::Kind::no_batch, .task = {1}, .chief = 1}, now());
  EXPECT_EQ(chief.wait_for_begun(0, 2, now()).end, 1);
}

TEST(Coordinator, AWorkerThatLeavesGetsNoTask) {
  Coordinator chief(1, 60);
  join_workers(chief, 1);
  chief.begin(0, 0, {});
  chief.open(0, 0, 9);
  chief.next(0, 0, {}, now());
  auto last = finished(0);
  last.leaves = true;
  EXPECT_EQ(chief.next(0, 0, last, now()).kind, Kind::over);
  EXPECT_EQ(chief.hold(0), 1);
  EXPECT_EQ(chief.wait_for_begun(0, 1, now()).end, 1);
}

// The worker had asked for work when it was killed.
TEST(Coordinator, AWorkerThatHasGoneGetsNoStep) {
  Coordinator chief(2, 60);
  join_workers(chief, 2);
  chief.begin(0, 0, {.parts = 2, .needed = 2});
  chief.open(0, 0, 1);
  chief.leave({"worker 0", 0});
  EXPECT_EQ(chief.next(0, 0, {}, now()).kind, Kind::wait);
  for (const int part : {0, 1}) {
    EXPECT_EQ(place_of(chief.next(0, 1, {}, now())), given(0, 0, 0, part));
    chief.next(0, 1, finished(0, {1}, part), now());
  }
  EXPECT_TRUE(chief.wait_for_step(now()));
}

// All get a signal to end; what one has begun, the others complete, and nobody begins another step.
TEST(Coordinator, WorkersThatLeaveBeginNoStepTogether) {
  Coordinator chief(2, 60);
  join_workers(chief, 2);
  chief.begin(0, 0, {.parts = 2, .needed = 2});
  chief.open(0, 0, 9);
  chief.next(0, 0, {}, now());
  chief.next(0, 1, {}, now());
  EXPECT_EQ(chief.next(0, 1, finished(0, {1}, 1), now()).kind, Kind::wait);
  auto last = finished(0, {1}, 0);
  last.leaves = true;
  EXPECT_EQ(chief.next(0, 0, last, now()).kind, Kind::over);
  EXPECT_EQ(chief.next(0, 1, {}, now()).kind, Kind::wait);
  EXPECT_EQ(chief.hold(0), 1);
  EXPECT_EQ(chief.wait_for_begun(0, 1, now()).end, 1);
  chief.release();
  chief.leave({"worker 0", 0});  // the others go on
  EXPECT_EQ(place_of(chief.next(0, 1, {}, now())), given(1, 0, 1, 0));
}

TEST(Coordinator, StalenessCountsTheStepsThatOthersFinishedMeanwhile) {
  Coordinator chief(2, 60);
  join_workers(chief, 2);
  chief.begin(0, 0, {});
  chief.open(0, 0, 9);
  chief.next(0, 0, {}, now());
  chief.next(0, 1, {}, now());
  for (const std::int64_t step : {1, 2}) chief.next(0, 1, finished(step), now());
  chief.next(0, 0, finished(0), now());
  for (const std::int64_t staleness : {0, 0, 2}) EXPECT_EQ(chief.wait_for_step(now())->staleness, staleness);
}

}  // namespace
}  // namespace lockstep::parameter_server
