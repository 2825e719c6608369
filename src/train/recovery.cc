#include "train/recovery.h"

#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "elastic/failures.h"
#include "lockstep/base/error.h"

namespace lockstep::train {

std::string TrainingWorker::broadcast_part(const std::string& bytes, int row) {
  return strategy_.topology().same_part.broadcast(bytes, row);
}

void TrainingWorker::regroup(const elastic::Change& change) {
  began_ = std::chrono::steady_clock::now();
  was_chief_ = strategy_.topology().is_chief();
  strategy_.regroup(change);
}

void TrainingWorker::join() {
  began_ = std::chrono::steady_clock::now();
  strategy_.join();
}

// What the first one says is the cause of the others.
void TrainingWorker::on_loss(const std::exception& error) {
  elastic::require_fewer_than_two_failures(*strategy_.membership().job().registry(),
                                           strategy_.completed_sections().count);
  if (loss_.empty()) loss_ = elastic::describe(error, strategy_.membership().members());
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
  if (training_) training_->end();
  training_.reset();
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
  const auto why = elastic::describe(error, strategy().membership().members());
  if (!sections_.goes_on_behind(error)) return false;
  log_warning(text(what, " broke off: ", why));
  return true;
}

bool Recovery::take_part(const std::string& description, const std::function<void()>& poll) {
  if (!strategy().is_elastic()) return true;
  auto& membership = strategy().membership();
  const auto number = strategy().next_training();
  if (strategy().topology().is_newcomer()) {
    const auto deadline =
        Deadline::after(std::chrono::duration<double>(strategy().settings().workers->group.timeout_seconds));
    if (!membership.wait_for_place(number, description, deadline, poll)) {
      log_warning(text(worker_.what(), " number ", number + 1, " of this program has ended before this process came; ",
                       "it goes on without having trained"));
      return false;
    }
    sections_.join([&] { worker_.join(); });
  }
  training_.emplace(membership, number, description);
  return true;
}

bool Recovery::newcomers_wait() { return training_ && training_->newcomers_wait(); }

bool Recovery::change(bool leaves) {
  elastic::Change change{.leaves = leaves};
  if (training_) change.newcomers = training_->newcomers();
  const bool changed = sections_.change(change);
  if (changed && leaves) training_.reset();  // it goes on without this worker
  if (training_) training_->on_change();
  return changed;
}

}  // namespace lockstep::train
