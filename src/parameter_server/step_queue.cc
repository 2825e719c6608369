#include "parameter_server/step_queue.h"

#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {

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

// The results of those steps that have not finished.
void StepQueue::cancel_from(std::int64_t step) {
  for (auto pending = pending_.lower_bound(step); pending != pending_.end(); pending = pending_.erase(pending)) {
    pending->second.result->state = StepResult::State::cancelled;
  }
  changed_.notify_all();
}

// Waits once.
void StepQueue::wait(Deadline deadline, const char* for_what) {
  if (present_.empty() && reconnected_by_.passed()) {
    throw ClusterError(text("all workers are lost: none has connected for ", reconnect_seconds_, " s"));
  }
  const auto until = present_.empty() && reconnected_by_.time() < deadline.time() ? reconnected_by_ : deadline;
  changed_.wait_until(mutex_, until.time());
  if (deadline.passed()) throw DeadlineExceeded(for_what, deadline.waited());
}

void StepQueue::throw_failure() {
  if (const auto failure = std::exchange(failure_, std::nullopt)) throw Error(*failure);
}

std::shared_ptr<StepResult> StepQueue::schedule(std::string name, std::string arguments, Deadline deadline) {
  MutexLock lock(mutex_);
  if (!open_) throw InvalidArgument("schedule: steps can be scheduled on the chief, in ClusterCoordinator::run, alone");
  throw_failure();
  while (pending_.size() >= kMostPending * static_cast<std::size_t>(workers_)) {
    wait(deadline, "waiting for workers, which have many scheduled steps before them");
    throw_failure();
  }
  const auto result = std::make_shared<StepResult>();
  pending_[schedule_.scheduled()] = {std::move(name), std::move(arguments), result};
  schedule_.add(1);
  changed_.notify_all();
  return result;
}

void StepQueue::join(Deadline deadline) {
  MutexLock lock(mutex_);
  while (!pending_.empty()) wait(deadline, "waiting for the scheduled steps");
  throw_failure();
}

bool StepQueue::done() {
  MutexLock lock(mutex_);
  return pending_.empty();
}

std::string StepQueue::fetch(const StepResult& result, Deadline deadline) {
  MutexLock lock(mutex_);
  while (result.state == StepResult::State::pending) wait(deadline, "waiting for a scheduled step");
  if (result.state == StepResult::State::done) return result.text;
  if (result.state == StepResult::State::failed) throw Error(result.text);
  throw Aborted("the step was cancelled, since another one failed or the program ended before it");
}

Assignment StepQueue::next(int worker, const std::optional<Report>& report, Deadline deadline) {
  MutexLock lock(mutex_);
  present_.insert(worker);
  if (report) take(worker, *report);
  while (open_ && !(report && report->leaves)) {
    if (const auto task = schedule_.next(worker)) {
      const auto& step = pending_.at(task->step);
      return {.kind = Assignment::Kind::task, .task = *task, .function = step.name, .arguments = step.arguments};
    }
    if (changed_.wait_until(mutex_, deadline.time()) == std::cv_status::timeout) {
      return {.kind = Assignment::Kind::wait};
    }
  }
  return {.kind = Assignment::Kind::over};
}

// Another worker may have finished the step, and a chief before this one may have given it out.
void StepQueue::take(int worker, const Report& report) {
  if (report.task.step >= schedule_.end_of_begun() || !schedule_.finish(worker, report.task)) return;
  const auto pending = pending_.find(report.task.step);
  auto& result = *pending->second.result;
  if (report.kind == Report::Kind::finished) {
    result = {StepResult::State::done, report.output};
  } else {
    result = {StepResult::State::failed, text("worker ", worker, " in the step \"", pending->second.name, "\": ", report.error)};
    if (!failure_) failure_ = result.text;
    const auto begun = schedule_.end_of_begun();
    schedule_.end_before(begun);
    cancel_from(begun);
  }
  pending_.erase(report.task.step);
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
