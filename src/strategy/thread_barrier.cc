#include "strategy/replica_threads.h"

#include "base/text.h"
#include "lockstep/base/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep::strategy {
namespace {

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

void ThreadBarrier::wait(Deadline deadline, const char* operation) {
  throw_if_aborted();
  const auto generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    open(generation);
    return;
  }
  for (int round = 0; round < spin_ && !opened(generation); ++round) pause_cpu();
  if (!opened(generation)) sleep_until_opened(generation, deadline, operation);
  if (generation_.load(std::memory_order_acquire) == generation) throw_if_aborted();
}

void ThreadBarrier::open(std::uint32_t generation) {
  arrived_.store(0, std::memory_order_relaxed);
  MutexLock lock(mutex_);
  generation_.store(generation + 1, std::memory_order_release);
  if (sleepers_ > 0) opened_.notify_all();
}

void ThreadBarrier::sleep_until_opened(std::uint32_t generation, Deadline deadline, const char* operation) {
  MutexLock lock(mutex_);
  ++sleepers_;
  while (!opened(generation)) {
    if (opened_.wait_until(mutex_, deadline.time()) == std::cv_status::timeout && !opened(generation)) {
      --sleepers_;
      const DeadlineExceeded error(operation, deadline.waited());
      if (reason_.empty()) reason_ = error.what();
      aborted_.store(true, std::memory_order_release);
      opened_.notify_all();
      throw error;
    }
  }
  --sleepers_;
}

void ThreadBarrier::abort(const std::string& reason) {
  MutexLock lock(mutex_);
  if (reason_.empty()) reason_ = reason.empty() ? "no reason was given" : reason;
  aborted_.store(true, std::memory_order_release);
  opened_.notify_all();
}

void ThreadBarrier::throw_if_aborted() {
  if (!aborted_.load(std::memory_order_acquire)) return;
  MutexLock lock(mutex_);
  throw Aborted(text("the group was aborted: ", reason_));
}

}  // namespace lockstep::strategy
