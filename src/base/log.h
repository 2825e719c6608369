// Warnings and notes for the person at the terminal, on stderr. Any thread may call these.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/deadline.h"

namespace lockstep {

void log_info(const std::string& message);
void log_warning(const std::string& message);

// A warning that unauthenticated peers can trigger at will. The first one is written at once, then at most one per
// minute, with the number of suppressed ones.
class RepeatedWarning {
 public:
  void log(const std::string& message);

 private:
  Mutex mutex_;
  std::chrono::steady_clock::time_point next_ LOCKSTEP_GUARDED_BY(mutex_){};
  std::int64_t left_out_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
};

// Says what a process waits for, where that takes long.
class WaitingNotice {
 public:
  // Logs the line after ten seconds, unless it was destroyed before; with the seconds that are left until the deadline,
  // if there is one.
  explicit WaitingNotice(std::string line, std::optional<Deadline> deadline = {})
      : thread_([line = std::move(line), deadline](const std::stop_token& stop) {
          if (stop_requested_by(Deadline::after(kUntilNotice), stop)) return;
          if (!deadline) return log_info(line);
          const auto left = std::chrono::duration_cast<std::chrono::seconds>(deadline->time() - Deadline::Clock::now());
          log_info(text(line, ", for ", std::max<std::int64_t>(0, left.count()), " s more"));
        }) {}

 private:
  static constexpr std::chrono::seconds kUntilNotice{10};

  std::jthread thread_;
};

}  // namespace lockstep
