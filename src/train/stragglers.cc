#include "train/stragglers.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/log.h"
#include "base/mutex.h"
#include "base/process.h"
#include "base/text.h"

namespace lockstep::train {

namespace {

constexpr std::size_t kWindow = 10;  // steps
constexpr double kSlow = 1.5;        // times as long as the others
constexpr double kNoticed = 1e-3;    // seconds by which it must be longer: less is the system's scheduling

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

std::string Stragglers::count(std::span<const double> seconds) {
  if (!steps_.empty() && steps_[0].size() != seconds.size()) {  // workers were lost, or have come
    steps_.clear();
    suspect_ = named_ = -1;
  }
  steps_.emplace_back(seconds.begin(), seconds.end());
  if (seconds.size() < 2 || steps_.size() < kWindow) return {};
  std::vector<double> usual;  // [rank]
  for (std::size_t rank = 0; rank < seconds.size(); ++rank) {
    std::vector<double> of_steps;
    for (const auto& step : steps_) of_steps.push_back(step[rank]);
    usual.push_back(median(std::move(of_steps)));
  }
  steps_.clear();
  const auto slowest = std::max_element(usual.begin(), usual.end());
  const double longest = *slowest, others = median(usual);
  const int before = suspect_;
  suspect_ = longest >= kSlow * others && longest - others >= kNoticed ? static_cast<int>(slowest - usual.begin()) : -1;
  if (suspect_ < 0) named_ = -1;
  if (suspect_ < 0 || suspect_ != before || suspect_ == named_) return {};
  named_ = suspect_;
  const auto milliseconds = [](double time) { return std::round(1e4 * time) / 10; };
  return text("worker ", named_, " is a straggler: it computes for ", milliseconds(longest),
              " ms a step and the others for ", milliseconds(others), " ms, so that they wait for it ",
              std::round(100 * (1 - others / longest)), "% of the time");
}

namespace {

using Clock = std::chrono::steady_clock;

void watch(const std::stop_token& stop, const StrategyImpl& strategy, const std::string& what, double limit_seconds) {
  const std::chrono::duration<double> between(std::min(1.0, limit_seconds / 4));
  auto since = Clock::now();
  std::uint64_t last = strategy.replicas().ended_steps();
  bool logged = false;
  while (!stop_requested_by(Deadline::after(between), stop)) {
    const auto now = Clock::now();
    if (const auto ended = strategy.replicas().ended_steps(); ended != last) {
      last = ended;
      since = now;
      logged = false;
    }
    const double seconds = std::chrono::duration<double>(now - since).count();
    if (logged || seconds < limit_seconds) continue;
    logged = true;
    log_warning(text(what, ": no batch of this worker has ended for ", seconds, " s; its threads are\n",
                     stacks_of_all_threads()));
  }
}

}  // namespace

std::jthread watch_for_hangs(const StrategyImpl& strategy, const std::string& what) {
  if (strategy.topology().all.size() == 1 && !strategy.workers().is_elastic()) return {};
  const double limit_seconds = strategy.settings().timeouts.step / 2;
  return std::jthread(
      [&strategy, what, limit_seconds](const std::stop_token& stop) { watch(stop, strategy, what, limit_seconds); });
}

}  // namespace lockstep::train
