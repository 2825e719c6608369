#include "parameter_server/step_schedule.h"

#include <algorithm>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {
namespace {

std::int64_t slowest(const std::map<int, std::int64_t>& steps_by) {
  const auto least = std::min_element(steps_by.begin(), steps_by.end(),
                                      [](const auto& a, const auto& b) { return a.second < b.second; });
  return least == steps_by.end() ? 0 : least->second;
}

}  // namespace

bool StepSchedule::is_finished(Task task) const {
  if (finished_.contains(task.step)) return true;
  return mode_.parts > 1 && task.step == finished_.complete() && finished_parts_.contains(task.part);
}

bool StepSchedule::must_wait(int worker) const {
  return mode_.most_ahead >= 0 && steps_by_.at(worker) - slowest(steps_by_) > mode_.most_ahead;
}

bool StepSchedule::is_given(Task task) const {
  return std::any_of(given_.begin(), given_.end(), [&](const auto& given) { return given.second == task; });
}

std::int64_t StepSchedule::end_of_open_steps() const {
  return mode_.parts > 1 ? std::min(scheduled_, finished_.complete() + 1) : scheduled_;
}

std::optional<Task> StepSchedule::first_free() const {
  for (auto step = finished_.complete(); step < end_of_open_steps(); ++step) {
    for (int part = 0; part < mode_.parts; ++part) {
      const Task task{step, part};
      if (!is_finished(task) && !is_given(task)) return task;
    }
  }
  return std::nullopt;
}

std::optional<Task> StepSchedule::next(int worker, bool may_begin) {
  if (const auto given = given_.find(worker); given != given_.end()) return given->second;
  steps_by_.try_emplace(worker, slowest(steps_by_));
  if (must_wait(worker)) return std::nullopt;
  const auto task = first_free();
  if (!task || (!may_begin && task->step >= end_of_given_)) return std::nullopt;
  given_.emplace(worker, *task);
  end_of_given_ = std::max(end_of_given_, task->step + 1);
  return task;
}

void StepSchedule::end_before(std::int64_t step) {
  const auto finished = finished_.numbers();  // ascending; the first is where they are complete
  if (step < std::max(finished_.complete(), finished.back() + (finished.size() > 1 ? 1 : 0)) ||
      (!finished_parts_.empty() && step <= finished_.complete())) {
    throw InvalidArgument(text("the steps are to end before step ", step, ", and later ones are finished already"));
  }
  scheduled_ = std::min(scheduled_, step);
  end_of_given_ = std::min(end_of_given_, step);
  std::erase_if(given_, [&](const auto& given) { return given.second.step >= scheduled_; });
}

bool StepSchedule::has(int worker, Task task) const {
  const auto given = given_.find(worker);
  return given != given_.end() && given->second == task;
}

void StepSchedule::abandon() {
  for (auto step = finished_.complete(); step < end_of_given_; ++step) finished_.add(step);
  given_.clear();
  tries_.clear();
  finished_parts_.clear();
  scheduled_ = finished_.complete();
}

bool StepSchedule::finish(int worker, Task task) {
  if (task.step < 0 || task.step >= end_of_given_ || task.part < 0 || task.part >= mode_.parts) {
    throw InvalidArgument(
        text("worker ", worker, " finished part ", task.part, " of step ", task.step, ", which nobody was given"));
  }
  if (const auto given = given_.find(worker); given != given_.end() && given->second == task) given_.erase(given);
  tries_.erase(task.step);
  ++steps_by_.try_emplace(worker, slowest(steps_by_)).first->second;
  if (is_finished(task) || task.step >= end_of_open_steps()) return false;
  if (mode_.parts == 1) return finished_.add(task.step);
  finished_parts_.insert(task.part);
  if (static_cast<int>(finished_parts_.size()) == mode_.needed) {
    finished_.add(task.step);
    finished_parts_.clear();
  }
  return true;
}

bool StepSchedule::give_again(int worker, Task task) {
  if (!has(worker, task)) return true;  // another worker has it
  if (++tries_[task.step] >= kMostTries) return false;
  given_.erase(worker);
  return true;
}

void StepSchedule::lose(int worker) {
  steps_by_.erase(worker);
  given_.erase(worker);
}

}  // namespace lockstep::parameter_server
