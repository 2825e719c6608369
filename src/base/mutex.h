// Mutexes that clang's thread safety analysis understands (-Wthread-safety), and waits of a thread that others may ask
// to stop. LOCKSTEP_GUARDED_BY names the mutex that protects a field, and the lint step checks that every access holds
// it.
#pragma once

#include <condition_variable>
#include <mutex>
#include <stop_token>

#include "lockstep/base/deadline.h"

#if defined(__clang__)
#define LOCKSTEP_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define LOCKSTEP_THREAD_ANNOTATION(x)
#endif
#define LOCKSTEP_GUARDED_BY(mutex) LOCKSTEP_THREAD_ANNOTATION(guarded_by(mutex))

namespace lockstep {

class LOCKSTEP_THREAD_ANNOTATION(capability("mutex")) Mutex {
 public:
  void lock() LOCKSTEP_THREAD_ANNOTATION(acquire_capability()) { mutex_.lock(); }
  void unlock() LOCKSTEP_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

class LOCKSTEP_THREAD_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) LOCKSTEP_THREAD_ANNOTATION(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  ~MutexLock() LOCKSTEP_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits on a Mutex that the caller holds.
using CondVar = std::condition_variable_any;

// Waits until `stop` is requested, at most until the deadline: whether it is. Any thread may call.
inline bool stop_requested_by(Deadline deadline, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any never;  // woken by `stop` alone
  std::unique_lock lock(mutex);
  never.wait_until(lock, stop, deadline.time(), [&] { return stop.stop_requested(); });
  return stop.stop_requested();  // what wait_until returns may be older
}

}  // namespace lockstep
