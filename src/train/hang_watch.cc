#include "train/hang_watch.h"

#include <algorithm>
#include <chrono>

#include "base/log.h"
#include "base/stop.h"
#include "base/text.h"
#include "base/thread_stacks.h"

namespace lockstep::train {
namespace {

using Clock = std::chrono::steady_clock;

void watch(const std::stop_token& stop, const StrategyImpl& strategy, const std::string& what, double limit_seconds) {
  const std::chrono::duration<double> between(std::min(1.0, limit_seconds / 4));
  auto since = Clock::now();
  std::uint64_t last = strategy.ended_runs();
  bool logged = false;
  while (!stop_requested_by(Deadline::after(between), stop)) {
    const auto now = Clock::now();
    if (const auto ended = strategy.ended_runs(); ended != last) {
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

HangWatch::HangWatch(const StrategyImpl& strategy, const std::string& what) {
  if (strategy.topology().all.size() == 1 && !strategy.workers().is_elastic()) return;
  const double limit_seconds = strategy.settings().timeouts.step / 2;
  thread_ = std::jthread(
      [&strategy, what, limit_seconds](const std::stop_token& stop) { watch(stop, strategy, what, limit_seconds); });
}

}  // namespace lockstep::train
