#include "parameter_server/applied_steps.h"

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

}  // namespace lockstep::parameter_server
