#include "train/elastic_training.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "elastic/membership.h"
#include "lockstep/base/error.h"

namespace lockstep::train {
namespace {

constexpr std::chrono::milliseconds kBetweenQuestions(50);  // between two agreements on whether newcomers have come

}  // namespace

bool ElasticTraining::take_part(const std::function<std::string()>& describe) {
  const auto description = describe();
  auto& membership = *strategy().workers().membership();
  const auto number = strategy().workers().next_training();
  if (strategy().topology().is_newcomer()) {
    const auto deadline = Deadline::after(std::chrono::duration<double>(strategy().settings().timeouts.start));
    const auto poll = [this] {
      if (received() != 0) throw Interrupted(received());
    };
    if (!membership.wait_for_place(number, description, deadline, poll)) {
      log_warning(text(worker_.what(), " number ", number + 1, " of this program has ended before this process came; ",
                       "it goes on without having trained"));
      return false;
    }
    sections_.join([&] { worker_.join(); });
  }
  open_ = membership.open(number, description);
  return true;
}

void ElasticTraining::end() {
  if (open_) open_->end();
  open_.reset();
}

void ElasticTraining::run(const std::function<Numbers()>& act, const Finish& finish) {
  // Others may be in another training when the Group is replaced; when act is called, all are in this section.
  const auto act_in_group = [&] {
    worker_.use_new_group();
    return act();
  };
  has_agreed_ = false;
  sections_.run(act_in_group, finish);
  if (has_agreed_) agreed_in_ = strategy().workers().completed_sections().generation;
}

Training::Numbers ElasticTraining::run_or_act(const std::function<Numbers()>& act) {
  if (strategy().workers().completed_sections().is_in_one) return act();
  Numbers completed;
  run(act, [&](const Numbers& numbers) { completed = numbers; });
  return completed;
}

std::string ElasticTraining::launchers_rank(int rank) const {
  return elastic::launchers_ranks(strategy().workers().membership()->members(), {rank});
}

bool ElasticTraining::goes_on_after(const std::exception& error, const std::string& what) {
  const auto why = elastic::describe(error, strategy().workers().membership()->members());
  if (!sections_.goes_on_behind(error)) return false;
  log_warning(text(what, " broke off: ", why));
  return true;
}

Training::Says ElasticTraining::says(bool stops) {
  auto mine = Training::says(stops);
  told_to_leave_ = mine[terminated] > 0;
  mine[newcomers] = open_ && open_->newcomers_wait() ? 1 : 0;
  mine[waited] = has_waited_ ? 1 : 0;
  return mine;
}

void ElasticTraining::change_workers(const std::function<void()>& save) {
  if (agreed_[interrupted] > 0 || stopping()) return;
  if (!agreed_by_these_workers()) return agree_again();  // workers were lost since, in a callback's section
  if (too_few()) wait_for_newcomers(save);
  std::vector<int> leaving;
  if (agreed_[terminated] > 0) {
    leaving = rows_that_leave();
    if (!agreed_by_these_workers()) return agree_again();
    if (rows() - static_cast<int>(leaving.size()) < options().min_workers) leaving.clear();
    if (worker_.leaves_in_turn() && !leaving.empty()) leaving.resize(1);  // the others leave after later steps
  }
  if (agreed_[newcomers] == 0 && leaving.empty()) return;
  const int row = worker_.rank() / worker_.row_size();
  const bool leaves = std::find(leaving.begin(), leaving.end(), row) != leaving.end();
  if (change(leaves) && leaves) throw Interrupted(SIGTERM);
  if (!leaving.empty()) agree_again();
}

// A worker that is told to leave says so again after the next step.
void ElasticTraining::agree_again() { agreed_[terminated] = 0; }

// Takes in newcomers, and lets this worker go where it `leaves`. False where all have regrouped since the agreement,
// and have to agree again.
bool ElasticTraining::change(bool leaves) {
  elastic::Change change{.leaves = leaves};
  if (open_) change.newcomers = open_->newcomers();
  const bool changed = sections_.change(change);
  if (changed && leaves) open_.reset();  // the training goes on without this worker
  if (open_) open_->on_change();
  return changed;
}

// Returns the rows with a worker that was told to end. What these have done by themselves is with the others then.
// Collective.
std::vector<int> ElasticTraining::rows_that_leave() {
  std::vector<int> leaving;
  const auto gather = [this] {
    worker_.come_together();
    Numbers told(static_cast<std::size_t>(worker_.peers().size()));
    told[static_cast<std::size_t>(worker_.peers().rank())] = told_to_leave_ ? 1 : 0;
    worker_.peers().sum(told);
    return told;
  };
  run(gather, [&](const Numbers& told) {
    for (std::size_t rank = 0; rank < told.size(); ++rank) {
      const int row = static_cast<int>(rank) / worker_.row_size();
      if (told[rank] > 0 && (leaving.empty() || leaving.back() != row)) leaving.push_back(row);
    }
  });
  return leaving;
}

// The workers that remain wait together, for a bounded time, as do newcomers that come, until there are enough.
void ElasticTraining::wait_for_newcomers(const std::function<void()>& save) {
  const auto deadline = Deadline::after(std::chrono::duration<double>(options().join_seconds));
  worker_.waits = true;
  const std::shared_ptr<void> ends(nullptr, [this](void*) { worker_.waits = has_waited_ = false; });
  do {
    std::this_thread::sleep_for(kBetweenQuestions);
    has_waited_ = strategy().topology().is_chief() && deadline.passed();
    agree(false);
    if (agreed_[terminated] + agreed_[interrupted] > 0) break;
    if (agreed_[newcomers] > 0) {
      change(false);
    } else if (agreed_[waited] > 0 && too_few()) {
      save();
      throw ClusterError(text("workers were lost, and ", rows(), worker_.row_size() > 1 ? " rows of the mesh" : "",
                              " remain; elastic.min_workers is ", options().min_workers,
                              ", and nobody has joined them for ", options().join_seconds, " s"));
    }
  } while (too_few());
}

// These follow from the last agreement, which is the same for all.
int ElasticTraining::rows() const { return static_cast<int>(workers()) / worker_.row_size(); }
bool ElasticTraining::too_few() const { return rows() < options().min_workers; }

}  // namespace lockstep::train
