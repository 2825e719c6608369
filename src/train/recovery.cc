#include "train/recovery.h"

#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "elastic/failures.h"
#include "lockstep/base/error.h"

namespace lockstep::train {

std::string TrainingWorker::broadcast_part(const std::string& bytes, int row) {
  return strategy_.same_part_workers().broadcast(bytes, row);
}

void TrainingWorker::regroup(const elastic::Change& change) {
  began_ = std::chrono::steady_clock::now();
  was_chief_ = strategy_.is_chief();
  strategy_.regroup(change);
}

void TrainingWorker::join(const elastic::Members& members, const std::shared_ptr<void>& presence) {
  began_ = std::chrono::steady_clock::now();
  strategy_.join(members, presence);
}

// What the first one says is the cause of the others.
void TrainingWorker::on_loss(const std::exception& error) {
  elastic::require_fewer_than_two_failures(*strategy_.job().registry(), strategy_.completed_sections().count);
  if (loss_.empty()) loss_ = elastic::describe(error, strategy_.job().members());
}

void TrainingWorker::on_regrouped(int size_before, bool updated) {
  on_same_section(updated);
  auto loss = std::exchange(loss_, "");
  if (loss.empty() && size() < size_before) loss = "others were told to end, and have left";
  if (rank() != 0) return;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
  log_warning(text(what_, " goes on with ", size(), " workers (", size_before, " before) after ", took.count(),
                   " s, at step ", steps(), loss.empty() ? "" : ": " + loss));
  if (!was_chief_) on_become_chief();
}

std::string TrainingWorker::print_all() { return print_state() + (waits ? "1" : "0"); }

void TrainingWorker::take_all(const std::string& printed, const std::string& printed_part) {
  waits = printed.back() == '1';
  take_state(std::string_view(printed).substr(0, printed.size() - 1), printed_part);
}

void Recovery::end() {
  watch_.reset();
  if (training_ < 0 || !strategy().is_chief()) return;
  const auto& job = strategy().job();
  elastic::Watch::tell_end(*job.stores(), training_, job.members());
}

void Recovery::run(const std::function<Numbers()>& act, const std::function<void(const Numbers& numbers)>& finish) {
  // Others may be in another training when the Group is replaced, but not in another section.
  const auto act_in_group = [&] {
    worker_.use_new_group();
    return act();
  };
  if (strategy().is_elastic()) return sections_.run(act_in_group, finish);
  sections_.updated = false;
  finish(act());
}

bool Recovery::goes_on_behind(const std::exception& error, const std::string& what) {
  if (!strategy().is_elastic()) return false;
  const auto why = elastic::describe(error, strategy().job().members());
  if (!sections_.goes_on_behind(error)) return false;
  log_warning(text(what, " broke off: ", why));
  return true;
}

bool Recovery::take_part(const std::string& description, const std::function<void()>& poll) {
  if (!strategy().is_elastic()) return true;
  training_ = strategy().next_training();
  description_ = description;
  if (!strategy().is_newcomer()) return true;
  const auto& job = strategy().job();
  const auto deadline =
      Deadline::after(std::chrono::duration<double>(strategy().settings().workers->group.timeout_seconds));
  const auto* const parallelism = strategy().parallelism();
  elastic::Candidate candidate(job.stores(), job.world(), training_, description,
                               parallelism != nullptr ? parallelism->part() : 0);
  const auto members = candidate.wait(deadline, poll);
  if (!members) {
    log_warning(text(worker_.what(), " number ", training_ + 1, " of this program has ended before this process came; ",
                     "it goes on without having trained"));
    training_ = -1;
    return false;
  }
  sections_.join([&] { worker_.join(*members, candidate.presence()); });
  return true;
}

bool Recovery::newcomers_wait() {
  if (training_ < 0 || strategy().job().world().local_rank != 0) return false;
  if (!watch_) watch_.emplace(strategy().job().registry(), training_, description_, worker_.row_size());
  return watch_->any();
}

bool Recovery::change(bool leaves) {
  elastic::Change change{.leaves = leaves};
  try {
    if (watch_) change.newcomers = watch_->waiting();
  } catch (const DeadlineExceeded&) {  // the store is slow: they are taken in later
  }
  const bool changed = sections_.change(change);
  if (changed && leaves) {
    watch_.reset();
    training_ = -1;  // it goes on without this worker
  }
  if (watch_) watch_->forget_invited();
  return changed;
}

}  // namespace lockstep::train
