#include "parameter_server/applied_steps.h"

#include <algorithm>
#include <iterator>

namespace lockstep::parameter_server {

AppliedSteps::AppliedSteps(std::span<const std::int64_t> numbers) {
  if (numbers.empty()) return;
  complete_ = numbers[0];
  for (const auto step : numbers.subspan(1)) add(step);
}

AppliedSteps AppliedSteps::saved(const SavedSteps& saved) {
  AppliedSteps steps;
  steps.complete_ = saved.end;
  steps.missing_ = saved.end - saved.updates;
  return steps;
}

bool AppliedSteps::add(std::int64_t step) {
  if (contains(step)) return false;
  later_.insert(step);
  advance();
  return true;
}

void AppliedSteps::advance() {
  while (!later_.empty() && *later_.begin() == complete_) {
    later_.erase(later_.begin());
    ++complete_;
  }
}

void AppliedSteps::close_below(std::int64_t end) {
  if (end <= complete_) return;
  const auto behind = later_.lower_bound(end);
  missing_ += end - complete_ - std::distance(later_.begin(), behind);
  complete_ = end;
  later_.erase(later_.begin(), behind);
  advance();
}

std::vector<std::int64_t> AppliedSteps::numbers() const {
  std::vector<std::int64_t> numbers{complete_};
  numbers.insert(numbers.end(), later_.begin(), later_.end());
  return numbers;
}

void AppliedSteps::send(StateWriter& to) const {
  to.numbers(numbers());
  to.number(missing_);
}

AppliedSteps AppliedSteps::received(StateReader& from) {
  AppliedSteps steps(from.numbers());
  steps.missing_ = from.number<std::int64_t>();
  return steps;
}

const std::vector<Push>* StepParts::add(Push push) {
  if (complete_.contains(push.task.step)) return nullptr;
  auto& parts = incomplete_[push.task.step];
  const auto place = std::lower_bound(parts.begin(), parts.end(), push.task.part,
                                      [](const Push& given, int part) { return given.task.part < part; });
  const bool is_new = place == parts.end() || place->task.part != push.task.part;
  if (is_new && static_cast<int>(parts.size()) < needed_) parts.insert(place, std::move(push));
  return static_cast<int>(parts.size()) == needed_ ? &parts : nullptr;
}

void StepParts::complete(std::int64_t step) {
  incomplete_.erase(step);
  complete_.add(step);
}

void StepParts::complete_below(std::int64_t end) {
  incomplete_.erase(incomplete_.begin(), incomplete_.lower_bound(end));
  complete_.close_below(end);
}

void StepParts::send(const PushSizes& sizes, StateWriter& to) const {
  to.number(incomplete_.size());
  for (const auto& [step, parts] : incomplete_) {
    to.number(parts.size());
    for (const auto& part : parts) parameter_server::send(part, sizes, to);
  }
  complete_.send(to);
}

void StepParts::receive(const PushSizes& sizes, StateReader& from) {
  incomplete_.clear();
  for (auto steps = from.number<std::size_t>(); steps > 0; --steps) {
    for (auto left = from.number<std::size_t>(); left > 0; --left) {
      auto push = receive_push(sizes, from);
      incomplete_[push.task.step].push_back(std::move(push));
    }
  }
  complete_ = AppliedSteps::received(from);
}

}  // namespace lockstep::parameter_server
