#include "collective/gpus/progress.h"

#include <algorithm>
#include <thread>

namespace lockstep::collective::gpus {
namespace {

// A shown number says this.
struct ShownProgress {
  std::int64_t calls = 0;
  bool waits = false;

  std::int64_t number() const { return 2 * calls + (waits ? 1 : 0); }
  static ShownProgress of(std::int64_t number) { return {number / 2, number % 2 == 1}; }
};

}  // namespace

void Progress::show(const std::function<std::int64_t()>& calls, const std::function<bool()>& waits) {
  MutexLock lock(showing_);
  if (shown_ != nullptr) shown_->show(ShownProgress{calls(), waits()}.number());
}

void Progress::answer() const {
  if (shown_ != nullptr) shown_->answer();
}

std::optional<std::vector<int>> Progress::ranks_without(const WatchedCall& call,
                                                        const std::function<bool()>& looks) const {
  constexpr std::chrono::milliseconds kForAnswers(1500), kBetweenLooks(2);
  if (shown_ == nullptr || size_ == 1) return std::vector<int>();
  shown_->ask();
  for (const auto until = Deadline::after(kForAnswers);; std::this_thread::sleep_for(kBetweenLooks)) {
    if (!looks()) return std::nullopt;
    const auto told = shown_->told();
    const auto late = late_ranks(call, told);
    const auto has_told = [&](int r) { return told.since_asked[static_cast<std::size_t>(r)]; };
    if (std::ranges::all_of(late, has_told) || until.passed()) return late;
  }
}

std::vector<int> Progress::late_ranks(const WatchedCall& call, const transport::ShownNumbers::Told& told) const {
  std::vector<int> late, late_peers;
  for (int r = 0; r < size_; ++r) {
    const auto index = static_cast<std::size_t>(r);
    const auto theirs = ShownProgress::of(told.numbers[index]);
    const bool waits = theirs.waits && told.since_asked[index];
    if (r == rank_ || (call.peers.empty() ? theirs.calls >= call.number : waits)) continue;
    late.push_back(r);
    if (std::ranges::find(call.peers, r) != call.peers.end()) late_peers.push_back(r);
  }
  return late_peers.empty() ? late : late_peers;
}

}  // namespace lockstep::collective::gpus
