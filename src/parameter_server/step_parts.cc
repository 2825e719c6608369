#include "parameter_server/step_parts.h"

#include <algorithm>

namespace lockstep::parameter_server {

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
