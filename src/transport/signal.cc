#include "transport/signal.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep::transport {
namespace {

// Not FUTEX_PRIVATE: the word may lie in memory of several processes.
long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

// The watcher registers itself and reads the value again; the writer writes the value and then looks for watchers. With
// sequential consistency one of the two sees the other.
void Signal::set(std::uint32_t value) {
  value_.exchange(value, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all();
}

void Signal::add(std::uint32_t difference) {
  value_.fetch_add(difference, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all();
}

void Signal::sleep_while(std::uint32_t seen, std::chrono::nanoseconds most) {
  const auto nanoseconds = std::max<std::int64_t>(most.count(), 0);
  const timespec timeout{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (value_.load(std::memory_order_seq_cst) == seen) futex(&value_, FUTEX_WAIT, seen, &timeout);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Signal::wake_all() { futex(&value_, FUTEX_WAKE, INT_MAX, nullptr); }

void pause_processor() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void yield_processor() { sched_yield(); }

}  // namespace lockstep::transport
