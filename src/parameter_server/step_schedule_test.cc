#include "parameter_server/step_schedule.h"

#include <gtest/gtest.h>

#include <random>

#include "base/expect_says_testing.h"
#include "parameter_server/shard_store.h"

namespace lockstep::parameter_server {
namespace {

TEST(StepSchedule, StepsAreGivenInOrderAndCountOnce) {
  StepSchedule schedule({});
  schedule.add(3);
  EXPECT_EQ(schedule.next(0), (Task{0}));
  EXPECT_EQ(schedule.next(1), (Task{1}));
  EXPECT_EQ(schedule.next(0), (Task{0}));  // asked again: it was started again
  EXPECT_TRUE(schedule.finish(1, {1}));
  EXPECT_FALSE(schedule.finish(1, {1}));
  EXPECT_EQ(schedule.next(1), (Task{2}));
  EXPECT_EQ(schedule.next(2), std::nullopt);
  EXPECT_TRUE(schedule.finish(0, {0}));
  EXPECT_FALSE(schedule.all_finished());
  EXPECT_TRUE(schedule.finish(1, {2}));
  EXPECT_TRUE(schedule.all_finished());
  schedule.add(1);
  EXPECT_EQ(schedule.next(0), (Task{3}));
}

TEST(StepSchedule, ALostWorkersStepIsGivenToTheNext) {
  StepSchedule schedule({});
  schedule.add(3);
  EXPECT_EQ(schedule.next(0), (Task{0}));
  EXPECT_EQ(schedule.next(1), (Task{1}));
  schedule.lose(0);
  EXPECT_EQ(schedule.next(2), (Task{0}));
  EXPECT_TRUE(schedule.finish(0, {0}));   // it was only slow
  EXPECT_FALSE(schedule.finish(2, {0}));  // once more
  EXPECT_EQ(schedule.next(2), (Task{2}));
}

TEST(StepSchedule, StepsThatAreTakenBackMayStillComeAndDoNotCount) {
  StepSchedule schedule({});
  schedule.add(10);
  for (int worker = 0; worker < 3; ++worker) schedule.next(worker);
  EXPECT_EQ(schedule.end_of_begun(), 3);
  EXPECT_TRUE(schedule.finish(1, {1}));
  schedule.lose(0);
  schedule.lose(2);  // which had step 2, and is only slow
  expect_says(message_of<InvalidArgument>([&] { schedule.end_before(1); }), "later ones are finished already");
  schedule.abandon();
  EXPECT_TRUE(schedule.all_finished());
  EXPECT_FALSE(schedule.finish(2, {2}));
  schedule.add(1);
  EXPECT_EQ(schedule.next(0), (Task{3}));  // no number is given out again
}

TEST(StepSchedule, PartsOfAStepAreComputedBeforeTheNextStep) {
  StepSchedule schedule({.parts = 3, .needed = 2});
  schedule.add(2);
  EXPECT_EQ(schedule.next(0), (Task{0, 0}));
  EXPECT_EQ(schedule.next(1), (Task{0, 1}));
  EXPECT_EQ(schedule.next(2), (Task{0, 2}));
  EXPECT_EQ(schedule.next(3), std::nullopt);
  EXPECT_TRUE(schedule.finish(0, {0, 0}));
  EXPECT_EQ(schedule.next(0), std::nullopt);  // the step is not complete
  EXPECT_TRUE(schedule.finish(2, {0, 2}));
  EXPECT_EQ(schedule.next(2), (Task{1, 0}));
  EXPECT_FALSE(schedule.finish(1, {0, 1}));  // not needed
  EXPECT_EQ(schedule.next(1), (Task{1, 1}));
}

TEST(StepSchedule, WhatCannotBeIsNamed) {
  StepSchedule schedule({.parts = 2, .needed = 2});
  schedule.add(2);
  for (const auto task : {Task{1, 0}, Task{-1, 0}, Task{0, 2}}) {
    expect_says(message_of<InvalidArgument>([&] { schedule.finish(3, task); }), "worker 3 finished part ");
  }
  expect_says(message_of<InvalidArgument>([] { StepSchedule({.parts = 2, .needed = 3}); }),
              "3 of 2 parts of a step are needed; it must be from 1 to 2");
  expect_says(message_of<InvalidArgument>([] { place_shards({}, {}, 0); }), "there are 0 parameter servers");
}

TEST(StepSchedule, AWorkerThatIsAheadWaitsForTheSlowest) {
  StepSchedule schedule({.most_ahead = 1});
  schedule.add(100);
  const auto step = [&](int worker) {
    const auto task = schedule.next(worker);
    return task && schedule.finish(worker, *task);
  };
  for (const int worker : {0, 1, 2}) schedule.next(worker);  // all take part
  for (const int worker : {0, 1, 2}) EXPECT_TRUE(step(worker));
  EXPECT_TRUE(step(0));
  EXPECT_TRUE(step(0));
  EXPECT_FALSE(step(0));  // two more than the others
  EXPECT_TRUE(step(1));
  EXPECT_FALSE(step(0));
  schedule.lose(2);
  EXPECT_TRUE(step(0));
  EXPECT_FALSE(step(0));
  EXPECT_TRUE(step(2));  // come back: it begins where the slowest is
  EXPECT_TRUE(step(1));
  EXPECT_TRUE(step(0));
}

// Workers that are lost anywhere, also between two servers, or only seem so and go on. Each step adds 1 to its own
// element of both servers' variables, so these tell how often it was applied.
class Simulation {
 public:
  Simulation(unsigned seed, const UpdateMode& mode)
      : random_(seed), schedule_(mode), workers_(static_cast<std::size_t>(3 + seed % 3)) {
    const std::vector<VariableSpec> variables{{"a", DType::float64, {kSteps}}, {"b", DType::float64, {kSteps}}};
    const auto places = place_shards(variables, {}, 2);
    for (int server = 0; server < 2; ++server) {
      stores_.push_back(std::make_unique<ShardStore>(ModelSpec{variables}, places, ServerNumber{server},
                                                     SGD({.learning_rate = 1}), mode));
    }
    schedule_.add(kSteps);
  }

  // Returns true where all steps were finished.
  bool run() {
    for (int events = 0; events < 20'000 && !schedule_.all_finished(); ++events) {
      const auto worker = random_() % workers_.size();
      act(static_cast<int>(worker), workers_[worker]);
    }
    return schedule_.all_finished();
  }

  int counted() const { return counted_; }

  std::vector<double> values(int server) const {
    std::vector<double> values(kSteps);
    stores_[static_cast<std::size_t>(server)]->shard(0).read(reinterpret_cast<std::byte*>(values.data()));
    return values;
  }

  static constexpr std::int64_t kSteps = 40;

 private:
  struct Worker {
    std::optional<Task> task;
    int pushed = 0;  // servers that have the task's gradients
  };

  void act(int number, Worker& worker) {
    const auto luck = random_() % 100;
    if (luck < 10) {  // lost, and started again
      schedule_.lose(number);
      worker = {};
    } else if (luck < 15) {  // thought lost
      schedule_.lose(number);
    } else if (!worker.task) {
      worker.task = schedule_.next(number);
    } else if (worker.pushed < 2) {
      push(*worker.task, worker.pushed++);
    } else {
      counted_ += schedule_.finish(number, *worker.task) ? 1 : 0;
      worker = {};
    }
  }

  void push(Task task, int server) {
    auto gradient = std::make_shared<std::vector<double>>(kSteps);
    (*gradient)[static_cast<std::size_t>(task.step)] = -1;
    stores_[static_cast<std::size_t>(server)]->push(
        {.task = task,
         .weight = 1,
         .gradients = {reinterpret_cast<const std::byte*>(gradient->data())},
         .memory = gradient});
  }

  std::mt19937 random_;
  StepSchedule schedule_;
  std::vector<std::unique_ptr<ShardStore>> stores_;
  std::vector<Worker> workers_;
  int counted_ = 0;
};

TEST(StepSchedule, EachStepIsAppliedOnceWhicheverWorkersAreLost) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    for (const auto& mode : {UpdateMode{}, UpdateMode{.parts = 3, .needed = 3}, UpdateMode{.parts = 3, .needed = 2},
                             UpdateMode{.most_ahead = 1}}) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << ", parts " << mode.parts << ", needed " << mode.needed
                                      << ", most ahead " << mode.most_ahead);
      Simulation simulation(seed, mode);
      ASSERT_TRUE(simulation.run());
      EXPECT_EQ(simulation.counted(), Simulation::kSteps * mode.needed);
      for (const int server : {0, 1}) EXPECT_EQ(simulation.values(server), std::vector<double>(Simulation::kSteps, 1));
    }
  }
}

}  // namespace
}  // namespace lockstep::parameter_server
