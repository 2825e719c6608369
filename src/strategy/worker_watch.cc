#include "strategy/worker_watch.h"

#include <chrono>
#include <utility>

namespace lockstep::strategy {
namespace {

constexpr std::chrono::seconds kBetweenCalls(1);

}  // namespace

WorkerWatch::WorkerWatch(Communicator workers)
    : workers_(std::move(workers)), thread_([this](const std::stop_token& stop) { watch(stop); }) {}

// In the midst of an exception it does not leave like one that has done its work.
WorkerWatch::~WorkerWatch() {
  if (std::uncaught_exceptions() > 0) abort("it ended with an error");
}

void WorkerWatch::check() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void WorkerWatch::watch(const std::stop_token& stop) {
  try {
    bool leaves = false;
    while (!leaves) {
      {
        std::unique_lock lock(mutex_);
        leaves = stopped_.wait_for(lock, stop, kBetweenCalls, [&] { return stop.stop_requested(); });
      }
      leaves = workers_.any(leaves);
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
  }
}

}  // namespace lockstep::strategy
