// Calls of several threads, carried out one after the other in the order in which they took a number.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/mutex.h"
#include "lockstep/base/deadline.h"

namespace lockstep::collective {

// Any thread may call anything. While nobody queues, taking a turn and passing it on are two atomic operations.
class TicketLock {
 public:
  std::uint64_t take_number() { return next_.fetch_add(1, std::memory_order_relaxed); }

  // Returns true when the number's turn has come, false when the deadline passed before.
  bool wait(std::uint64_t number, Deadline deadline);

  // Ends the turn of `number`.
  void pass(std::uint64_t number);

 private:
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::uint64_t> serving_{0};
  std::atomic<int> sleepers_{0};
  Mutex mutex_;
  CondVar passed_;
};

}  // namespace lockstep::collective
