#include "parameter_server/coordinator.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {
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

bool Coordinator::wait(Deadline deadline) {
  if (closed_) throw Aborted("the chief is ending");
  return changed_.wait_until(mutex_, deadline.time()) == std::cv_status::no_timeout;
}

void Coordinator::begin(std::int64_t call, std::int64_t model, const UpdateMode& mode, std::string plan,
                        std::string state, const std::vector<std::vector<double>>& uncounted) {
  MutexLock lock(mutex_);
  plan_ = std::move(plan);
  state_ = std::move(state);
  call_ = call;
  over_ = false;
  training_ = &trainings_.try_emplace(model, mode).first->second;
  parts_.clear();
  finished_.clear();
  for (const auto& results : uncounted) finished_.push_back({0, {results}});
  failure_.clear();
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
  auto step = std::move(finished_.front().finished);
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
  for (const auto& [step, finished] : finished_) {
    if (step < steps.end && &training->second == training_) steps.uncounted.push_back(finished.results);
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
  training.saved = step;
}

void Coordinator::tell_saved(std::int64_t model, std::int64_t end) {
  MutexLock lock(mutex_);
  if (const auto training = trainings_.find(model); training != trainings_.end()) training->second.saved = end;
}

bool Coordinator::knows(std::int64_t model) {
  MutexLock lock(mutex_);
  return trainings_.contains(model) || trained_by_program_.contains(model);
}

void Coordinator::set_trained_by_program(std::int64_t model) {
  MutexLock lock(mutex_);
  trained_by_program_.insert(model);
}

void Coordinator::begin_steps(std::int64_t call) {
  MutexLock lock(mutex_);
  steps_->open();
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

void Coordinator::require_worker(int worker) const {
  if (worker >= 0 && worker < workers_) return;
  throw InvalidArgument(text("worker ", worker, " asks for work; there are ", workers_, " workers"));
}

std::optional<std::string> Coordinator::start(std::int64_t call, int worker, const std::string& plan,
                                              Deadline deadline) {
  require_worker(worker);
  MutexLock lock(mutex_);
  while (call != call_ || over_) {
    if (outcomes_.contains(call)) return "";
    if (!wait(deadline)) return std::nullopt;
  }
  if (plan == plan_) return state_;
  const auto [ours, theirs] = first_difference(plan_, plan);
  failure_ = text("the processes' fits differ: the chief has ", ours, ", and worker ", worker, " has ", theirs);
  changed_.notify_all();
  throw InvalidArgument(failure_);
}

Assignment Coordinator::next(std::int64_t call, int worker, const std::optional<Report>& report, Deadline deadline) {
  require_worker(worker);
  if (has_steps(call)) return steps_->next(worker, report, deadline);
  MutexLock lock(mutex_);
  bool taken = !report;
  while (true) {
    if (outcomes_.contains(call)) return {.kind = Assignment::Kind::over};
    if (steps_call_ == call) return {.kind = Assignment::Kind::wait};
    if (call == call_ && !over_) {
      if (!std::exchange(taken, true)) take(worker, *report);
      if (report && (report->leaves || report->kind == Report::Kind::failed)) return {.kind = Assignment::Kind::over};
      if (auto assignment = assign(worker)) return *assignment;
    }
    if (!wait(deadline)) return {.kind = Assignment::Kind::wait};
  }
}

bool Coordinator::has_steps(std::int64_t call) {
  MutexLock lock(mutex_);
  return steps_call_ == call;
}

std::optional<Assignment> Coordinator::assign(int worker) {
  // One that has gone may have a call waiting here, and one that is not known yet could not be missed.
  if (held_ || !present_.contains(text("worker ", worker))) return std::nullopt;
  // A step that workers compute together needs them all.
  const bool may_begin = leaving_.empty() || training_->schedule.mode().parts == 1;
  const auto task = training_->schedule.next(worker, may_begin);
  if (!task) return std::nullopt;
  finished_before_.insert_or_assign(worker, training_->schedule.finished().count());
  const auto& [first, batch] = *std::prev(training_->opened.upper_bound(task->step));
  return Assignment{.kind = Assignment::Kind::task,
                    .task = *task,
                    .epoch = batch.epoch,
                    .index = batch.index + task->step - first,
                    .learning_rate = learning_rate_,
                    .chief = chief_,
                    .finished = training_->schedule.finished().complete()};
}

void Coordinator::take(int worker, const Report& report) {
  if (report.leaves) leaving_.insert(worker);
  if (report.chief != chief_ && report.kind != Report::Kind::failed) return;
  switch (report.kind) {
    case Report::Kind::incomplete:
      if (training_->schedule.give_again(worker, report.task)) break;
      [[fallthrough]];
    case Report::Kind::failed:
      if (failure_.empty()) failure_ = text("worker ", worker, ": ", report.error);
      break;
    case Report::Kind::no_batch:
      // Where another worker has said so of an earlier step, this one's was taken back.
      if (training_->schedule.has(worker, report.task)) training_->schedule.end_before(report.task.step);
      break;
    case Report::Kind::finished: collect(worker, report); break;
  }
  changed_.notify_all();
}

void Coordinator::collect(int worker, const Report& report) {
  const auto step = report.task.step;
  for (const auto& [number, values] : report.buffers) buffers_[worker][number] = values;
  const auto finished = training_->schedule.finished().count();
  if (!training_->schedule.finish(worker, report.task)) return;
  const auto before = finished_before_.find(worker);
  parts_[report.task] = {report.results, before == finished_before_.end() ? 0 : finished - before->second};
  if (!training_->schedule.finished().contains(step)) return;
  FinishedStep whole;
  auto& sums = whole.results;
  const auto first = parts_.lower_bound({step, 0}), end = parts_.lower_bound({step + 1, 0});
  for (auto part = first; part != end; ++part) {
    const auto& results = part->second.results;
    sums.resize(std::max(sums.size(), results.size()));
    for (std::size_t i = 0; i < results.size(); ++i) sums[i] += results[i];
    whole.staleness = std::max(whole.staleness, part->second.staleness);
  }
  parts_.erase(first, end);
  finished_.push_back({step, std::move(whole)});
}

std::optional<std::string> Coordinator::outcome(std::int64_t call, Deadline deadline) {
  MutexLock lock(mutex_);
  while (!outcomes_.contains(call)) {
    if (!wait(deadline)) return std::nullopt;
  }
  return outcomes_.at(call);
}

void Coordinator::join(const Process& process) {
  MutexLock lock(mutex_);
  present_.insert(process.name);
  const bool is_new = joined_.insert(process.name).second;
  if (process.worker >= 0) steps_->set_present(process.worker);
  changed_.notify_all();
  if (is_new || replicas_of_shards_ > 1 || !process.name.starts_with("ps")) return;
  for (const auto model : trained_by_program_) {
    log_warning(text(process.name, " is back: its shards of model number ", model,
                     " may lack the updates since the last checkpoint"));
  }
  for (const auto& [model, training] : trainings_) {
    if (trained_by_program_.contains(model)) continue;
    log_warning(text(process.name, " is back: its shards of model number ", model, " may lack the updates of ",
                     training.schedule.finished().count() - training.saved, " steps since the last checkpoint"));
  }
}

void Coordinator::leave(const Process& process) {
  MutexLock lock(mutex_);
  if (const auto found = present_.find(process.name); found != present_.end()) present_.erase(found);
  if (!has_workers()) reconnected_by_ = until_reconnected();
  if (process.worker >= 0 && !present_.contains(process.name)) {
    leaving_.erase(process.worker);
    for (auto& [model, training] : trainings_) training.schedule.lose(process.worker);
    steps_->lose(process.worker);
  }
  changed_.notify_all();
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
