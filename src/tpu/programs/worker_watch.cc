#include "tpu/programs/worker_watch.h"

#include <chrono>
#include <utility>

#include "base/mutex.h"

namespace lockstep::programs {
namespace {

constexpr std::chrono::seconds kBetweenCalls(1);
constexpr double kSecondsToLeave = 10;
constexpr std::chrono::seconds kForLastResults(10);  // results of programs that all have launched

}  // namespace

WorkerWatch::WorkerWatch(Communicator workers, std::function<void(const std::string& reason)> on_failure)
    : workers_(std::move(workers)),
      on_failure_(std::move(on_failure)),
      thread_([this](const std::stop_token& stop) { watch(stop); }) {}

// Where an exception destroys the watch, the other workers wait for results that will not come.
WorkerWatch::~WorkerWatch() {
  if (std::uncaught_exceptions() > 0) abort("it ended with an error");
}

void WorkerWatch::check() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  if (after_leaving_ && after_leaving_->passed())
    throw ClusterError(
        "another worker has ended its strategy, and this one waits for it: all must make the same calls");
}

void WorkerWatch::watch(const std::stop_token& stop) {
  try {
    bool leaves = false;
    while (!leaves) {
      leaves = stop_requested_by(Deadline::after(kBetweenCalls), stop);
      if (leaves) {
        workers_.with_timeout(kSecondsToLeave).any(true);
      } else if (workers_.any(false)) {
        const std::lock_guard lock(mutex_);
        after_leaving_ = Deadline::after(kForLastResults);
        leaves = true;
      }
    }
  } catch (const std::exception& error) {
    {
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
    }
    on_failure_(error.what());
  }
}

}  // namespace lockstep::programs
