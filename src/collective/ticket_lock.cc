#include "collective/ticket_lock.h"

namespace lockstep::collective {

bool TicketLock::wait(std::uint64_t number, Deadline deadline) {
  if (serving_.load(std::memory_order_acquire) == number) return true;
  MutexLock lock(mutex_);
  sleepers_.fetch_add(1);
  bool in_time = true;
  while (in_time && serving_.load() != number) {
    in_time = passed_.wait_until(mutex_, deadline.time()) != std::cv_status::timeout || serving_.load() == number;
  }
  sleepers_.fetch_sub(1);
  return in_time;
}

void TicketLock::pass(std::uint64_t number) {
  serving_.store(number + 1);
  if (sleepers_.load() == 0) return;
  MutexLock lock(mutex_);
  passed_.notify_all();
}

}  // namespace lockstep::collective
