#include "parameter_server/step_queue.h"

#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {

void StepQueue::set_chief(std::int64_t chief) {
  MutexLock lock(mutex_);
  chief_ = chief;
}

void StepQueue::open() {
  MutexLock lock(mutex_);
  open_ = true;
  reconnected_by_ = Deadline::after(std::chrono::duration<double>(reconnect_seconds_));
  changed_.notify_all();
}

void StepQueue::close() {
  MutexLock lock(mutex_);
  open_ = false;
  cancel_from(0);
  schedule_.abandon();
  failure_.reset();
  changed_.notify_all();
}

// Cancels the results of the steps from `step` on that have not finished.
void StepQueue::cancel_from(std::int64_t step) {
  for (auto pending = pending_.lower_bound(step); pending != pending_.end(); pending = pending_.erase(pending)) {
    pending->second.result->state = StepResult::State::cancelled;
  }
  changed_.notify_all();
}

StepQueue::Waiting StepQueue::begin_wait(double step_seconds) const {
  return {step_seconds, schedule_.finished().count(), Deadline::after(std::chrono::duration<double>(step_seconds))};
}

void StepQueue::wait_once(Waiting& waiting, const char* for_what) {
  if (present_.empty() && reconnected_by_.passed()) {
    throw ClusterError(text("all workers are lost: none has been connected for ", reconnect_seconds_, " s"));
  }
  if (waiting.finished != schedule_.finished().count()) waiting = begin_wait(waiting.step_seconds);
  if (waiting.deadline.passed()) throw DeadlineExceeded(for_what, waiting.deadline.waited());
  const bool reconnecting = present_.empty() && reconnected_by_.time() < waiting.deadline.time();
  changed_.wait_until(mutex_, (reconnecting ? reconnected_by_ : waiting.deadline).time());
}

void StepQueue::fail(const std::string& why) {
  MutexLock lock(mutex_);
  if (open_) note_failure(why);
}

// Cancels the steps that no worker has begun.
void StepQueue::note_failure(const std::string& why) {
  if (!failure_) failure_ = why;
  const auto begun = schedule_.end_of_begun();
  schedule_.end_before(begun);
  cancel_from(begun);
}

void StepQueue::throw_failure() {
  if (const auto failure = std::exchange(failure_, std::nullopt)) throw Error(*failure);
}

std::shared_ptr<StepResult> StepQueue::schedule(std::string name, std::string arguments, double step_seconds) {
  MutexLock lock(mutex_);
  if (!open_) throw InvalidArgument("schedule: steps can be scheduled on the chief, in ClusterCoordinator::run, alone");
  throw_failure();
  const auto most = kMostPending * static_cast<std::size_t>(workers_);
  auto waiting = begin_wait(step_seconds);
  while (pending_.size() >= most && !failure_) wait_once(waiting, "waiting for workers, which have many steps to do");
  throw_failure();
  const auto result = std::make_shared<StepResult>();
  pending_[schedule_.scheduled()] = {std::move(name), std::move(arguments), result};
  schedule_.add(1);
  changed_.notify_all();
  return result;
}

void StepQueue::join(double step_seconds) {
  MutexLock lock(mutex_);
  auto waiting = begin_wait(step_seconds);
  while (!pending_.empty()) wait_once(waiting, "waiting for a scheduled step to finish");
  throw_failure();
}

bool StepQueue::done() {
  MutexLock lock(mutex_);
  return pending_.empty();
}

std::int64_t StepQueue::finished() {
  MutexLock lock(mutex_);
  return schedule_.finished().count();
}

std::int64_t StepQueue::end_of_finished() {
  MutexLock lock(mutex_);
  require_finished();
  return schedule_.scheduled();
}

void StepQueue::skip_to(std::int64_t step) {
  MutexLock lock(mutex_);
  require_finished();
  if (step > schedule_.scheduled()) schedule_ = StepSchedule({}, step);
}

void StepQueue::require_finished() const {
  if (!pending_.empty()) {
    throw InvalidArgument(text("a checkpoint of a loop with parameter servers: ", pending_.size(),
                               " scheduled steps have not finished; call ClusterCoordinator::join before"));
  }
}

std::string StepQueue::fetch(const StepResult& result, double step_seconds) {
  MutexLock lock(mutex_);
  auto waiting = begin_wait(step_seconds);
  while (result.state == StepResult::State::pending) wait_once(waiting, "waiting for a scheduled step to finish");
  if (result.state == StepResult::State::done) return result.text;
  if (result.state == StepResult::State::failed) throw Error(result.text);
  throw Aborted("the step was cancelled, since another one failed or the program ended before it");
}

Assignment StepQueue::next(int worker, const std::optional<Report>& report, Deadline deadline) {
  MutexLock lock(mutex_);
  if (report && report->chief == chief_) take(worker, *report);
  while (open_) {
    if (const auto task = present_.contains(worker) ? schedule_.next(worker) : std::nullopt) {
      const auto& step = pending_.at(task->step);
      return {.kind = Assignment::Kind::task,
              .task = *task,
              .chief = chief_,
              .finished = schedule_.finished().complete(),
              .function = step.name,
              .arguments = step.arguments};
    }
    if (changed_.wait_until(mutex_, deadline.time()) == std::cv_status::timeout) {
      return {.kind = Assignment::Kind::wait};
    }
  }
  return {.kind = Assignment::Kind::over};
}

// Another worker may have finished the step.
void StepQueue::take(int worker, const Report& report) {
  if (report.kind == Report::Kind::incomplete && schedule_.give_again(worker, report.task)) {
    return changed_.notify_all();
  }
  if (!schedule_.finish(worker, report.task)) return;
  const auto pending = pending_.find(report.task.step);
  auto& result = *pending->second.result;
  if (report.kind == Report::Kind::finished) {
    result = {StepResult::State::done, report.output};
  } else {
    result = {StepResult::State::failed,
              text("worker ", worker, " in the step \"", pending->second.name, "\": ", report.error)};
    note_failure(result.text);
  }
  pending_.erase(report.task.step);
  changed_.notify_all();
}

void StepQueue::set_present(int worker) {
  MutexLock lock(mutex_);
  present_.insert(worker);
  changed_.notify_all();
}

void StepQueue::lose(int worker) {
  MutexLock lock(mutex_);
  schedule_.lose(worker);
  present_.erase(worker);
  if (present_.empty()) reconnected_by_ = Deadline::after(std::chrono::duration<double>(reconnect_seconds_));
  changed_.notify_all();
}

}  // namespace lockstep::parameter_server
