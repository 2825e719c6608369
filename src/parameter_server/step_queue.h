// Steps that a program schedules by name, and workers compute: the chief's part of a ClusterCoordinator.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "base/mutex.h"
#include "parameter_server/service.h"
#include "parameter_server/step_schedule.h"

namespace lockstep::parameter_server {

// The result of a step. Guarded by the mutex of its queue.
struct StepResult {
  enum class State { pending, done, failed, cancelled } state = State::pending;
  std::string text;  // done: what the step returned; failed: why
};

// Any thread. Calls that wait throw DeadlineExceeded where no step has finished for `step_seconds`, and ClusterError
// where no worker has been connected for `reconnect_seconds`.
class StepQueue {
 public:
  // `chief`: as Coordinator's.
  StepQueue(int workers, double reconnect_seconds, std::int64_t chief = 1)
      : workers_(workers), reconnect_seconds_(reconnect_seconds), chief_(chief) {}
  void set_chief(std::int64_t chief);

  // --- the chief's program

  // Between the two, workers get steps. `close` cancels the steps that have not finished.
  void open();
  void close();

  // Waits while kMostPending steps a worker have not finished. Throws as `join` where a step has failed.
  std::shared_ptr<StepResult> schedule(std::string name, std::string arguments, double step_seconds);
  static constexpr std::size_t kMostPending = 256;

  // Waits until all have finished. Where one has failed since this last threw, cancels the steps that no worker had
  // begun, and throws Error with the first failure.
  void join(double step_seconds);
  bool done();
  std::int64_t finished();  // steps

  // For checkpoints: the number after the last step. Throws InvalidArgument where one has not finished.
  std::int64_t end_of_finished();

  // Steps are numbered from `step` on, if that is not below end_of_finished(), which throws.
  void skip_to(std::int64_t step);

  // `join` and `schedule` throw Error with `why`, while the queue is open.
  void fail(const std::string& why);

  // Waits for the step and returns its output. Throws Error with the step's own, and Aborted where it was cancelled.
  std::string fetch(const StepResult& result, double step_seconds);

  // --- for workers, as ChiefService's

  Assignment next(int worker, const std::optional<Report>& report, Deadline deadline);
  void set_present(int worker);
  void lose(int worker);

 private:
  struct Pending {
    std::string name, arguments;
    std::shared_ptr<StepResult> result;
  };
  void take(int worker, const Report& report) LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  void cancel_from(std::int64_t step) LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  void note_failure(const std::string& why) LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  void require_finished() const LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  void throw_failure() LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  // A wait that may last as long as steps finish.
  struct Waiting {
    double step_seconds = 0;
    std::int64_t finished = 0;
    Deadline deadline;
  };
  Waiting begin_wait(double step_seconds) const LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));
  void wait_once(Waiting& waiting, const char* for_what) LOCKSTEP_THREAD_ANNOTATION(requires_capability(mutex_));

  const int workers_;
  const double reconnect_seconds_;
  Mutex mutex_;
  CondVar changed_;
  std::int64_t chief_ LOCKSTEP_GUARDED_BY(mutex_);
  bool open_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  StepSchedule schedule_ LOCKSTEP_GUARDED_BY(mutex_) = StepSchedule({});
  std::map<std::int64_t, Pending> pending_ LOCKSTEP_GUARDED_BY(mutex_);  // [step]
  std::optional<std::string> failure_ LOCKSTEP_GUARDED_BY(mutex_);       // the first that nobody was told of
  std::set<int> present_ LOCKSTEP_GUARDED_BY(mutex_);                    // workers that are connected
  Deadline reconnected_by_ LOCKSTEP_GUARDED_BY(mutex_) = Deadline::never();
};

}  // namespace lockstep::parameter_server
