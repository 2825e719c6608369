#include "parameter_server/step_queue.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/expect_says_testing.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {
namespace {

using Kind = Assignment::Kind;

Deadline this_moment() { return Deadline::after(std::chrono::seconds(0)); }
Deadline in_a_while() { return Deadline::after(std::chrono::seconds(30)); }
constexpr double kNow = 0, kSoon = 30;

Report finished_queue(std::int64_t step, const std::string& output = "") {
  return {.kind = Report::Kind::finished, .task = {step}, .chief = 1, .output = output};
}
Report failed(std::int64_t step) { return {.kind = Report::Kind::failed, .task = {step}, .chief = 1, .error = "why"}; }

TEST(StepQueue, GivesOutWhatIsScheduledAndKeepsItsResults) {
  StepQueue queue(2, 60);
  for (const int worker : {0, 1}) queue.set_present(worker);
  EXPECT_EQ(queue.next(0, {}, this_moment()).kind, Kind::over);
  EXPECT_THROW(queue.schedule("a", "", kNow), InvalidArgument);
  queue.open();
  EXPECT_EQ(queue.next(0, {}, this_moment()).kind, Kind::wait);
  const auto first = queue.schedule("a", "1", kNow), second = queue.schedule("b", "2", kNow);
  EXPECT_EQ(queue.next(0, {}, this_moment()),
            (Assignment{.kind = Kind::task, .task = {0}, .chief = 1, .function = "a", .arguments = "1"}));
  EXPECT_EQ(queue.next(1, {}, this_moment()),
            (Assignment{.kind = Kind::task, .task = {1}, .chief = 1, .function = "b", .arguments = "2"}));
  EXPECT_FALSE(queue.done());
  EXPECT_THROW(queue.join(kNow), DeadlineExceeded);
  queue.next(1, finished_queue(1, "result"), this_moment());
  queue.next(1, finished_queue(1, "again"), this_moment());
  EXPECT_EQ(queue.fetch(*second, kNow), "result");
  EXPECT_THROW(queue.fetch(*first, kNow), DeadlineExceeded);
  queue.next(0, finished_queue(0), this_moment());
  EXPECT_TRUE(queue.done());
  queue.join(kNow);
  queue.close();
  EXPECT_EQ(queue.next(0, {}, this_moment()).kind, Kind::over);
}

TEST(StepQueue, ALostWorkersStepIsGivenToAnother) {
  StepQueue queue(2, 60);
  for (const int worker : {0, 1}) queue.set_present(worker);
  queue.open();
  const auto result = queue.schedule("a", "", kNow);
  queue.next(0, {}, this_moment());
  EXPECT_EQ(queue.next(1, {}, this_moment()).kind, Kind::wait);
  queue.lose(0);
  EXPECT_EQ(queue.next(0, {}, this_moment()).kind, Kind::wait);  // of a call that the lost worker had made
  EXPECT_EQ(queue.next(1, {}, this_moment()).task.step, 0);
  queue.next(0, finished_queue(0, "of the lost one"), this_moment());  // it was slow
  queue.next(1, finished_queue(0, "of the other"), this_moment());
  EXPECT_EQ(queue.fetch(*result, kNow), "of the lost one");
}

TEST(StepQueue, AFailureCancelsWhatNobodyHasBegunAndIsToldOnce) {
  StepQueue queue(2, 60);
  for (const int worker : {0, 1}) queue.set_present(worker);
  queue.open();
  const auto first = queue.schedule("a", "", kNow), second = queue.schedule("a", "", kNow);
  const auto third = queue.schedule("a", "", kNow);
  queue.next(0, {}, this_moment());
  queue.next(1, {}, this_moment());
  EXPECT_EQ(queue.next(0, failed(0), this_moment()).kind, Kind::wait);
  EXPECT_THROW(queue.fetch(*third, kNow), Aborted);
  EXPECT_THROW(queue.join(kNow), DeadlineExceeded);  // the second one is being computed
  queue.next(1, finished_queue(1, "x"), this_moment());
  expect_says(message_of<Error>([&] { queue.join(kNow); }), "worker 0 in the step \"a\": why");
  queue.join(kNow);
  EXPECT_EQ(queue.fetch(*second, kNow), "x");
  expect_says(message_of<Error>([&] { queue.fetch(*first, kNow); }), "why");
  const auto next = queue.schedule("b", "", kNow);  // no number comes twice
  EXPECT_EQ(queue.next(0, {}, this_moment()).task.step, 2);
  queue.next(0, failed(2), this_moment());
  expect_says(message_of<Error>([&] { queue.schedule("b", "", kNow); }), "in the step \"b\"");
}

// Another try completes the update; three are made.
TEST(StepQueue, AStepThatReachedSomeServersIsGivenAgain) {
  StepQueue queue(2, 60);
  for (const int worker : {0, 1}) queue.set_present(worker);
  queue.open();
  const auto completed = queue.schedule("a", "", kNow), lost = queue.schedule("b", "", kNow);
  const auto incomplete = [](std::int64_t step) {
    return Report{.kind = Report::Kind::incomplete, .task = {step}, .chief = 1, .error = "ps 1 does not answer"};
  };
  queue.next(0, {}, this_moment());
  EXPECT_EQ(queue.next(0, incomplete(0), this_moment()).task.step, 0);
  EXPECT_EQ(queue.next(0, finished_queue(0), this_moment()).task.step, 1);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(queue.next(0, incomplete(1), this_moment()).task.step, 1);
  EXPECT_EQ(queue.next(0, incomplete(1), this_moment()).kind, Kind::wait);
  queue.fetch(*completed, kNow);
  expect_says(message_of<Error>([&] { queue.fetch(*lost, kNow); }), "in the step \"b\": ps 1 does not answer");
}

TEST(StepQueue, NumbersOfStepsGoOnAfterAnEnd) {
  StepQueue queue(1, 60);
  queue.set_present(0);
  queue.open();
  const auto begun = queue.schedule("a", "", kNow), waiting = queue.schedule("a", "", kNow);
  queue.next(0, {}, this_moment());
  queue.close();
  EXPECT_THROW(queue.fetch(*begun, kNow), Aborted);
  EXPECT_THROW(queue.fetch(*waiting, kNow), Aborted);
  queue.open();
  queue.schedule("b", "", kNow);
  EXPECT_EQ(queue.next(0, finished_queue(0), this_moment()).task.step, 1);
}

TEST(StepQueue, AReportOfAnotherChiefsStepIsIgnored) {
  StepQueue queue(1, 60, 2);
  queue.set_present(0);
  queue.open();
  const auto result = queue.schedule("a", "", kNow);
  EXPECT_EQ(queue.next(0, {}, this_moment()).chief, 2);
  EXPECT_EQ(queue.next(0, finished_queue(0, "of the first chief"), this_moment()).task.step, 0);
  EXPECT_THROW(queue.fetch(*result, kNow), DeadlineExceeded);
}

TEST(StepQueue, SchedulingWaitsForWorkersThatHaveMuchToDo) {
  StepQueue queue(1, 60);
  queue.set_present(0);
  queue.open();
  for (std::size_t i = 0; i < StepQueue::kMostPending; ++i) queue.schedule("a", "", kNow);
  EXPECT_THROW(queue.schedule("a", "", kNow), DeadlineExceeded);
  std::jthread worker([&] {
    queue.next(0, {}, in_a_while());
    queue.next(0, finished_queue(0), in_a_while());
  });
  queue.schedule("a", "", kSoon);
}

TEST(StepQueue, WithoutAWorkerNothingWaitsForever) {
  StepQueue queue(1, 0);
  queue.open();
  const auto result = queue.schedule("a", "", kNow);
  expect_says(message_of<ClusterError>([&] { queue.join(kSoon); }), "all workers are lost");
  expect_says(message_of<ClusterError>([&] { queue.fetch(*result, kSoon); }), "all workers are lost");
}

}  // namespace
}  // namespace lockstep::parameter_server
