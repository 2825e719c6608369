#include "parameter_server/step_parts.h"

namespace lockstep::parameter_server {

std::optional<std::vector<Push>> StepParts::add(Push push) {
  const auto [step, part] = push.task;
  if (complete_.contains(step)) return std::nullopt;
  auto& parts = incomplete_[step];
  parts.emplace(part, std::move(push));
  if (static_cast<int>(parts.size()) < needed_) return std::nullopt;
  std::vector<Push> all;
  for (auto& [number, given] : parts) all.push_back(std::move(given));
  incomplete_.erase(step);
  complete_.add(step);
  return all;
}

}  // namespace lockstep::parameter_server
