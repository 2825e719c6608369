// Waits of a thread that others may ask to stop.
#pragma once

#include <condition_variable>
#include <mutex>
#include <stop_token>

#include "lockstep/base/deadline.h"

namespace lockstep {

// Waits until `stop` is requested, at most until the deadline: whether it is. Any thread may call.
inline bool stop_requested_by(Deadline deadline, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any never;  // woken by `stop` alone
  std::unique_lock lock(mutex);
  never.wait_until(lock, stop, deadline.time(), [&] { return stop.stop_requested(); });
  return stop.stop_requested();  // what wait_until returns may be older
}

}  // namespace lockstep
