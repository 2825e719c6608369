#include "parameter_server/coordinator.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {

std::string ChiefState::print() const { return text(chief, " ", changes, "\n", values); }

ChiefState ChiefState::parse(const std::string& printed) {
  ChiefState state;
  const auto end = printed.find('\n');
  std::istringstream numbers(printed.substr(0, end));
  if (end == std::string::npos || !(numbers >> state.chief >> state.changes) || !(numbers >> std::ws).eof())
    throw DataError("the chief's state does not begin with the numbers of a chief and of its changes");
  state.values = printed.substr(end + 1);
  return state;
}

namespace {

constexpr std::int64_t kUnknownNumber = std::int64_t{1} << 50;

}  // namespace

void Coordinator::set_chief(std::int64_t chief) {
  MutexLock lock(mutex_);
  chief_ = chief;
  steps_->set_chief(chief);
}

void Coordinator::close() {
  MutexLock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Coordinator::begin_call(std::int64_t call, const std::string& name) {
  MutexLock lock(mutex_);
  calls_[call] = name;
  different_calls_.clear();
  changed_.notify_all();
}

void Coordinator::end_program(bool failed) {
  MutexLock lock(mutex_);
  program_ended_ = true;
  program_failed_ = failed;
  changed_.notify_all();
}

bool Coordinator::wait(Deadline deadline) {
  if (closed_) throw Aborted("the chief is ending");
  return changed_.wait_until(mutex_, deadline.time()) == std::cv_status::no_timeout;
}

void Coordinator::begin(std::int64_t call, std::int64_t model, const UpdateMode& mode, std::string plan,
                        std::string state, const std::vector<std::vector<double>>& uncounted) {
  MutexLock lock(mutex_);
  plan_ = std::move(plan);
  state_ = std::move(state);
  state_changes_ = 0;
  call_ = call;
  over_ = false;
  training_ = &trainings_.try_emplace(model, mode).first->second;
  parts_.clear();
  finished_.clear();
  for (const auto& results : uncounted) finished_.push_back({.results = results});
  failure_ = different_calls_;
  reconnected_by_ = until_reconnected();
  changed_.notify_all();
}

bool Coordinator::has_workers() const {
  return std::any_of(present_.begin(), present_.end(), [](const auto& name) { return name.starts_with("worker"); });
}

Deadline Coordinator::until_reconnected() const {
  return Deadline::after(std::chrono::duration<double>(reconnect_seconds_));
}

void Coordinator::open(std::int64_t epoch, std::int64_t index, std::int64_t steps) {
  MutexLock lock(mutex_);
  training_->opened[training_->schedule.scheduled()] = {epoch, index};
  training_->schedule.add(steps < 0 ? kUnknownNumber : steps);
  changed_.notify_all();
}

void Coordinator::set_learning_rate(std::optional<double> rate) {
  MutexLock lock(mutex_);
  learning_rate_ = rate;
}

void Coordinator::stop() {
  MutexLock lock(mutex_);
  training_->schedule.end_before(training_->schedule.end_of_begun());
  changed_.notify_all();
}

bool Coordinator::step_is_ready(Deadline look, Deadline deadline) {
  MutexLock lock(mutex_);
  while (true) {
    const bool lost = !has_workers() && reconnected_by_.passed();
    if (!finished_.empty() || !failure_.empty() || training_->schedule.all_finished() || lost || deadline.passed()) {
      return true;
    }
    if (!wait(look)) return false;
  }
}

std::optional<Coordinator::FinishedStep> Coordinator::wait_for_step(Deadline deadline) {
  MutexLock lock(mutex_);
  while (finished_.empty()) {
    if (failure_.empty() && training_->schedule.all_finished()) return std::nullopt;
    wait_for_workers(deadline, "waiting for a worker to finish a step");
  }
  auto step = std::move(finished_.front());
  finished_.pop_front();
  return step;
}

// Waits once.
void Coordinator::wait_for_workers(Deadline deadline, const char* for_what) {
  if (!failure_.empty()) throw InvalidArgument(failure_);
  if (!has_workers() && reconnected_by_.passed()) {
    throw ClusterError(text("all workers are lost: none has connected again for ", reconnect_seconds_, " s"));
  }
  if (wait(has_workers() || deadline.time() < reconnected_by_.time() ? deadline : reconnected_by_)) return;
  if (!deadline.passed()) return;
  std::vector<int> missing;
  for (int worker = 0; worker < workers_; ++worker) {
    if (!present_.contains(text("worker ", worker))) missing.push_back(worker);
  }
  throw DeadlineExceeded(for_what, deadline.waited(), {},
                         missing.empty() ? "" : text(" (workers ", lockstep::join(missing), " do not answer)"));
}

std::int64_t Coordinator::hold(std::int64_t model) {
  MutexLock lock(mutex_);
  held_ = true;
  const auto training = trainings_.find(model);
  return training == trainings_.end() ? 0 : training->second.schedule.end_of_begun();
}

void Coordinator::release() {
  MutexLock lock(mutex_);
  held_ = false;
  changed_.notify_all();
}

Coordinator::Finished Coordinator::wait_for_begun(std::int64_t model, std::int64_t end, Deadline deadline) {
  MutexLock lock(mutex_);
  const auto training = trainings_.find(model);
  if (training == trainings_.end()) return {};
  const auto& schedule = training->second.schedule;
  const auto begun = [&] { return std::min(end, schedule.end_of_begun()); };
  while (schedule.finished().complete() < begun()) {
    wait_for_workers(deadline, "waiting for the steps before a checkpoint");
  }
  Finished steps{.end = begun()};
  for (const auto& finished : finished_) {
    if (finished.step < steps.end && &training->second == training_) steps.uncounted.push_back(finished.results);
  }
  return steps;
}

void Coordinator::require_idle(std::int64_t model) {
  MutexLock lock(mutex_);
  const auto training = trainings_.find(model);
  if (training == trainings_.end()) return;
  const auto& schedule = training->second.schedule;
  if (schedule.finished().complete() >= schedule.end_of_begun()) return;
  throw InvalidArgument("a checkpoint cannot be loaded while workers compute the steps of an epoch");
}

void Coordinator::resume(std::int64_t model, const UpdateMode& mode, std::int64_t step) {
  require_idle(model);
  MutexLock lock(mutex_);
  auto& training = trainings_.try_emplace(model, mode).first->second;
  training.schedule = StepSchedule(mode, step);
  training.opened.clear();
  if (step > 0) training.saved = step;
}

void Coordinator::tell_saved(std::int64_t model, std::int64_t end) {
  MutexLock lock(mutex_);
  if (const auto training = trainings_.find(model); training != trainings_.end()) training->second.saved = end;
  if (const auto loop = trained_by_program_.find(model); loop != trained_by_program_.end()) loop->second = end;
}

bool Coordinator::knows(std::int64_t model) {
  MutexLock lock(mutex_);
  return trainings_.contains(model) || trained_by_program_.contains(model);
}

void Coordinator::set_trained_by_program(std::int64_t model) {
  MutexLock lock(mutex_);
  trained_by_program_.try_emplace(model);
}

void Coordinator::begin_steps(std::int64_t call) {
  MutexLock lock(mutex_);
  steps_->open();
  if (!different_calls_.empty()) steps_->fail(different_calls_);
  steps_call_ = call;
  changed_.notify_all();
}

void Coordinator::end(std::int64_t call, std::string outcome) {
  MutexLock lock(mutex_);
  if (steps_call_ == call) {
    steps_call_.reset();
    steps_->close();
  }
  outcomes_[call] = std::move(outcome);
  if (call == call_ && training_ != nullptr) {
    over_ = true;
    training_->schedule.abandon();  // what a fit leaves that has failed
    parts_.clear();
    failure_.clear();
    buffers_.clear();
    state_.clear();
  }
  changed_.notify_all();
}

std::map<int, std::map<int, std::string>> Coordinator::buffers() {
  MutexLock lock(mutex_);
  return buffers_;
}

void Coordinator::forget_buffers() {
  MutexLock lock(mutex_);
  buffers_.clear();
}

void Coordinator::change_state(std::string state) {
  MutexLock lock(mutex_);
  buffers_.clear();
  if (over_) return;  // `begin` gets the next fit's
  state_ = std::move(state);
  ++state_changes_;
}

bool Coordinator::is_present(const std::string& process) const {
  MutexLock lock(mutex_);
  return present_.contains(process);
}

bool Coordinator::wait_for_joining(int processes, Deadline deadline) {
  MutexLock lock(mutex_);
  while (static_cast<int>(joined_.size()) < processes) {
    if (!wait(deadline)) return false;
  }
  return true;
}

bool Coordinator::wait_for_leaving(const std::string& but, Deadline deadline) {
  MutexLock lock(mutex_);
  const auto stays = [&](const std::string& name) { return but.empty() || !name.starts_with(but); };
  while (std::any_of(present_.begin(), present_.end(), stays)) {
    if (!wait(deadline)) return false;
  }
  return true;
}

}  // namespace lockstep::parameter_server
