// Warnings and notes for the person at the terminal, on stderr. Any thread may call these.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/mutex.h"

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

}  // namespace lockstep
