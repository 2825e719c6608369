// A barrier for threads with a deadline and an abort that wakes all waiters, which std::barrier lacks. A thread that
// waits for the next step blocks without polling.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/mutex.h"
#include "lockstep/base/deadline.h"

namespace lockstep::strategy {

// Any thread may call any method. After a wait threw, the barrier stays aborted: the others' waits throw too.
class ThreadBarrier {
 public:
  // For `size` threads; one that waits polls `spin` times before it blocks.
  ThreadBarrier(int size, int spin) : size_(size), spin_(spin) {}

  // Returns when all threads have called wait as often as this one. What a thread wrote before its wait, every thread
  // sees after its own (release and acquire on generation_).
  // Throws DeadlineExceeded{operation} at the deadline, Aborted when abort was called.
  void wait(Deadline deadline, const char* operation);

  void abort(const std::string& reason);

 private:
  bool opened(std::uint32_t generation) const {
    return generation_.load(std::memory_order_acquire) != generation || aborted_.load(std::memory_order_acquire);
  }
  void open(std::uint32_t generation);
  void sleep_until_opened(std::uint32_t generation, Deadline deadline, const char* operation);
  void throw_if_aborted();

  const int size_;
  const int spin_;

  // A cache line each: arrivals must not slow the threads that watch the generation.
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> generation_{0};
  std::atomic<bool> aborted_{false};

  alignas(64) Mutex mutex_;
  CondVar opened_;
  int sleepers_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::string reason_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::strategy
