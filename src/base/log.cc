#include "base/log.h"

#include "base/text.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace lockstep {
namespace {

// Never destroyed: threads may log while the program exits.
spdlog::logger& logger() {
  static auto* const instance = [] {
    auto* made = new spdlog::logger("lockstep", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("[%H:%M:%S] lockstep %^%l%$: %v");
    return made;
  }();
  return *instance;
}

}  // namespace

void log_info(const std::string& message) { logger().info("{}", message); }
void log_warning(const std::string& message) { logger().warn("{}", message); }

void RepeatedWarning::log(const std::string& message) {
  constexpr std::chrono::minutes kBetween(1);
  MutexLock lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) {
    ++left_out_;
    return;
  }
  next_ = now + kBetween;
  const auto others = left_out_ == 0 ? "" : text(" (", left_out_, " such warnings since the last one)");
  left_out_ = 0;
  log_warning(message + others);
}

}  // namespace lockstep
