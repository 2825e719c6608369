#include "train/training_worker.h"

#include <string_view>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/state.h"
#include "elastic/membership.h"

namespace lockstep::train {
namespace {

constexpr const char* kFrom = "another worker's state";

}  // namespace

std::string TrainingWorker::broadcast_part(const std::string& bytes, int row) {
  return strategy_.topology().same_part.broadcast(bytes, row);
}

void TrainingWorker::regroup(const elastic::Change& change) {
  began_ = std::chrono::steady_clock::now();
  was_chief_ = strategy_.topology().is_chief();
  strategy_.workers().regroup(change);
}

void TrainingWorker::join() {
  began_ = std::chrono::steady_clock::now();
  strategy_.workers().join();
}

// Keeps the first loss, which is the cause of the others.
void TrainingWorker::on_loss(const std::exception& error) {
  const auto& membership = *strategy_.workers().membership();
  membership.require_fewer_than_two_failures(strategy_.workers().completed_sections().count);
  if (loss_.empty()) loss_ = elastic::describe(error, membership.members());
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

std::string TrainingWorker::print_update() { return checkpoint::print_state(update()); }
void TrainingWorker::take_update(const std::string& printed) { checkpoint::parse_state(kFrom, printed, update())(); }

std::string TrainingWorker::print_part() { return checkpoint::print_state(part()); }
std::string TrainingWorker::print_all() { return checkpoint::print_state(common()) + (waits ? "1" : "0"); }

void TrainingWorker::take_all(const std::string& printed, const std::string& printed_part) {
  waits = printed.back() == '1';
  const auto change_part = checkpoint::parse_state(kFrom, printed_part, part());
  const auto change_common =
      checkpoint::parse_state(kFrom, std::string_view(printed).substr(0, printed.size() - 1), common());
  change_part();
  change_common();
}

}  // namespace lockstep::train
