#include "base/log.h"

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

}  // namespace lockstep
