// The chief's functions that other processes call.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "parameter_server/coordinator.h"

namespace lockstep::parameter_server {
namespace {

constexpr const char* kAll =
    "all processes call fit, evaluate and ClusterCoordinator::run, so no is_chief() may be around them";

}  // namespace

bool Coordinator::has_begun(std::int64_t call, const std::string& name, Deadline deadline) {
  MutexLock lock(mutex_);
  while (!calls_.contains(call)) {
    if (program_failed_) throw ClusterError("its program has failed");
    if (program_ended_) {
      throw ClusterError(
          text("its program has ended without the call of ", name, " that another process makes; ", kAll));
    }
    if (!wait(deadline)) return false;
  }
  if (calls_.at(call) == name) return true;
  different_calls_ = text("the processes do not make the same calls: number ", call, " is ", calls_.at(call),
                          " on the chief, and ", name, " on another process; ", kAll);
  if (!over_ && failure_.empty()) failure_ = different_calls_;
  steps_->fail(different_calls_);
  changed_.notify_all();
  throw InvalidArgument(different_calls_);
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
  if (plan == plan_) return ChiefState{chief_, state_changes_, state_}.print();
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
                    .finished = training_->schedule.finished().complete(),
                    .state = state_changes_};
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
      // Where another worker has reported that an earlier step has no batch, this step was taken back.
      if (training_->schedule.has(worker, report.task)) training_->schedule.end_before(report.task.step);
      break;
    case Report::Kind::finished: collect(worker, report); break;
  }
  changed_.notify_all();
}

void Coordinator::collect(int worker, const Report& report) {
  const auto step = report.task.step;
  if (report.state == state_changes_) {
    for (const auto& [number, values] : report.buffers) buffers_[worker][number] = values;
  }
  const auto finished = training_->schedule.finished().count();
  if (!training_->schedule.finish(worker, report.task)) return;
  const auto before = finished_before_.find(worker);
  parts_[report.task] = {step, report.results, before == finished_before_.end() ? 0 : finished - before->second};
  if (!training_->schedule.finished().contains(step)) return;
  FinishedStep whole{.step = step};
  auto& sums = whole.results;
  const auto first = parts_.lower_bound({step, 0}), end = parts_.lower_bound({step + 1, 0});
  for (auto part = first; part != end; ++part) {
    const auto& results = part->second.results;
    sums.resize(std::max(sums.size(), results.size()));
    for (std::size_t i = 0; i < results.size(); ++i) sums[i] += results[i];
    whole.staleness = std::max(whole.staleness, part->second.staleness);
  }
  parts_.erase(first, end);
  finished_.push_back(std::move(whole));
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
  const auto warn = [&](std::int64_t model, std::int64_t steps) {
    log_warning(text(process.name, " is back: its shards of model number ", model, " may lack the updates of ", steps,
                     " steps since the last checkpoint"));
  };
  for (const auto& [model, saved] : trained_by_program_) {
    if (saved) warn(model, steps_->finished() - *saved);
  }
  for (const auto& [model, training] : trainings_) {
    if (training.saved) warn(model, training.schedule.finished().count() - *training.saved);
  }
}

void Coordinator::leave(const Process& process) {
  MutexLock lock(mutex_);
  if (const auto found = present_.find(process.name); found != present_.end()) present_.erase(found);
  if (!has_workers()) reconnected_by_ = until_reconnected();
  const bool matters = (!over_ || steps_call_) && !program_ended_ && !present_.contains(process.name);
  if (matters && !leaving_.contains(process.worker)) {
    log_warning(
        text(process.name, " has ended or does not answer", process.worker >= 0 ? ": others compute its steps" : ""));
  }
  if (process.worker >= 0 && !present_.contains(process.name)) {
    leaving_.erase(process.worker);
    for (auto& [model, training] : trainings_) training.schedule.lose(process.worker);
    steps_->lose(process.worker);
  }
  changed_.notify_all();
}

}  // namespace lockstep::parameter_server
