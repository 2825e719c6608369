#include "parameter_server/step_queue.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/expect_says_testing.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {
namespace {

using Kind = Assignment::Kind;

Deadline now() { return Deadline::after(std::chrono::seconds(0)); }
Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

Report finished(std::int64_t step, const std::string& output = "") {
  return {.kind = Report::Kind::finished, .task = {step}, .output = output};
}
Report failed(std::int64_t step) { return {.kind = Report::Kind::failed, .task = {step}, .error = "why"}; }

TEST(StepQueue, GivesOutWhatIsScheduledAndKeepsItsResults) {
  StepQueue queue(2, 60);
  EXPECT_EQ(queue.next(0, {}, now()).kind, Kind::over);
  EXPECT_THROW(queue.schedule("a", "", now()), InvalidArgument);
  queue.open();
  EXPECT_EQ(queue.next(0, {}, now()).kind, Kind::wait);
  const auto first = queue.schedule("a", "1", now()), second = queue.schedule("b", "2", now());
  EXPECT_EQ(queue.next(0, {}, now()), (Assignment{.kind = Kind::task, .task = {0}, .function = "a", .arguments = "1"}));
  EXPECT_EQ(queue.next(1, {}, now()), (Assignment{.kind = Kind::task, .task = {1}, .function = "b", .arguments = "2"}));
  EXPECT_FALSE(queue.done());
  EXPECT_THROW(queue.join(now()), DeadlineExceeded);
  queue.next(1, finished(1, "result"), now());
  queue.next(1, finished(1, "again"), now());
  EXPECT_EQ(queue.fetch(*second, now()), "result");
  EXPECT_THROW(queue.fetch(*first, now()), DeadlineExceeded);
  queue.next(0, finished(0), now());
  EXPECT_TRUE(queue.done());
  queue.join(now());
  queue.close();
  EXPECT_EQ(queue.next(0, {}, now()).kind, Kind::over);
}

TEST(StepQueue, ALostWorkersStepIsGivenToAnother) {
  StepQueue queue(2, 60);
  queue.open();
  const auto result = queue.schedule("a", "", now());
  queue.next(0, {}, now());
  EXPECT_EQ(queue.next(1, {}, now()).kind, Kind::wait);
  queue.lose(0);
  EXPECT_EQ(queue.next(1, {}, now()).task.step, 0);
  queue.next(0, finished(0, "of the lost one"), now());  // it was slow
  queue.next(1, finished(0, "of the other"), now());
  EXPECT_EQ(queue.fetch(*result, now()), "of the lost one");
}

TEST(StepQueue, AFailureCancelsWhatNobodyHasBegunAndIsToldOnce) {
  StepQueue queue(2, 60);
  queue.open();
  const auto first = queue.schedule("a", "", now()), second = queue.schedule("a", "", now());
  const auto third = queue.schedule("a", "", now());
  queue.next(0, {}, now());
  queue.next(1, {}, now());
  EXPECT_EQ(queue.next(0, failed(0), now()).kind, Kind::wait);
  EXPECT_THROW(queue.fetch(*third, now()), Aborted);
  EXPECT_THROW(queue.join(now()), DeadlineExceeded);  // the second one is being computed
  queue.next(1, finished(1, "x"), now());
  expect_says(message_of<Error>([&] { queue.join(now()); }), "worker 0 in the step \"a\": why");
  queue.join(now());
  EXPECT_EQ(queue.fetch(*second, now()), "x");
  expect_says(message_of<Error>([&] { queue.fetch(*first, now()); }), "why");
  const auto next = queue.schedule("b", "", now());  // no number comes twice
  EXPECT_EQ(queue.next(0, {}, now()).task.step, 2);
  queue.next(0, failed(2), now());
  expect_says(message_of<Error>([&] { queue.schedule("b", "", now()); }), "in the step \"b\"");
}

TEST(StepQueue, NumbersOfStepsGoOnAfterAnEnd) {
  StepQueue queue(1, 60);
  queue.open();
  const auto begun = queue.schedule("a", "", now()), waiting = queue.schedule("a", "", now());
  queue.next(0, {}, now());
  queue.close();
  EXPECT_THROW(queue.fetch(*begun, now()), Aborted);
  EXPECT_THROW(queue.fetch(*waiting, now()), Aborted);
  queue.open();
  queue.schedule("b", "", now());
  EXPECT_EQ(queue.next(0, finished(0), now()).task.step, 1);
}

TEST(StepQueue, SchedulingWaitsForWorkersThatHaveMuchToDo) {
  StepQueue queue(1, 60);
  queue.open();
  for (std::size_t i = 0; i < StepQueue::kMostPending; ++i) queue.schedule("a", "", now());
  EXPECT_THROW(queue.schedule("a", "", now()), DeadlineExceeded);
  std::jthread worker([&] {
    queue.next(0, {}, soon());
    queue.next(0, finished(0), soon());
  });
  queue.schedule("a", "", soon());
}

TEST(StepQueue, WithoutAWorkerNothingWaitsForever) {
  StepQueue queue(1, 0);
  queue.open();
  const auto result = queue.schedule("a", "", now());
  expect_says(message_of<ClusterError>([&] { queue.join(soon()); }), "all workers are lost");
  expect_says(message_of<ClusterError>([&] { queue.fetch(*result, soon()); }), "all workers are lost");
}

}  // namespace
}  // namespace lockstep::parameter_server
