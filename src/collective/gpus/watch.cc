#include "collective/gpus/watch.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::collective::gpus {

Watch::~Watch() {
  MutexLock lock(mutex_);
  end();
}

void Watch::end() {
  ends_ = true;
  for (const auto& call : running_) events_.on_end(call);
  running_.clear();
  changed_.notify_all();
}

void Watch::begin() {
  thread_ = std::jthread([this] {
    leave_captures_alone();
    loop();
  });
}

void Watch::add(WatchedCall call) {
  MutexLock lock(mutex_);
  if (ends_) return events_.on_end(call);
  running_.push_back(std::move(call));
  changed_.notify_all();
}

bool Watch::is_idle() {
  MutexLock lock(mutex_);
  return running_.empty();
}

bool Watch::wait_for_all(Deadline deadline) {
  MutexLock lock(mutex_);
  while (!running_.empty() && !ends_) {
    if (changed_.wait_until(mutex_, deadline.time()) == std::cv_status::timeout) break;
  }
  return running_.empty() || ends_;
}

// Returns the first call that runs, when there is one; nothing when the watch ends.
std::optional<WatchedCall> Watch::next() {
  constexpr std::chrono::milliseconds kBetweenIdleEvents(50);
  while (true) {
    {
      MutexLock lock(mutex_);
      const auto until = Deadline::after(kBetweenIdleEvents);
      while (running_.empty() && !ends_) {
        if (changed_.wait_until(mutex_, until.time()) == std::cv_status::timeout) break;
      }
      if (ends_) return std::nullopt;
      if (!running_.empty()) return running_.front();
    }
    events_.on_idle();
  }
}

bool Watch::ends() {
  MutexLock lock(mutex_);
  return ends_;
}

// Returns the call whose deadline has passed first, if one has.
std::optional<WatchedCall> Watch::late() {
  MutexLock lock(mutex_);
  const auto first =
      std::ranges::min_element(running_, {}, [](const WatchedCall& call) { return call.deadline.time(); });
  return first != running_.end() && first->deadline.passed() ? std::optional(*first) : std::nullopt;
}

void Watch::loop() {
  while (const auto call = next()) {
    bool is_broken = false;
    try {
      is_broken = !has_ended(*call);
    } catch (const Error& error) {
      events_.on_error(error.what());
      is_broken = true;
    }
    MutexLock lock(mutex_);
    if (ends_) return;
    if (is_broken) return end();
    events_.on_end(*call);
    running_.pop_front();
    changed_.notify_all();
  }
}

// Returns true when the call has ended, or nobody watches any more; false where it can no longer end.
bool Watch::has_ended(const WatchedCall& call) {
  constexpr std::chrono::milliseconds kBetweenProblems(20);
  const auto begun = Deadline::Clock::now();
  auto asked = begun;
  bool is_broken = false;
  const auto is_over = [&] {
    if (has_come(call.end) || ends()) return true;
    if (Deadline::Clock::now() - asked < kBetweenProblems) return false;
    asked = Deadline::Clock::now();
    is_broken = events_.problem(asked - begun);
    if (is_broken) return true;
    const auto first = late();
    if (first) events_.on_late(*first);
    return is_broken = first.has_value();
  };
  wait_until(is_over, Deadline::never());
  return !is_broken;
}

}  // namespace lockstep::collective::gpus
