// A mutex that clang's thread safety analysis understands (-Wthread-safety). LOCKSTEP_GUARDED_BY names the mutex that
// protects a field, and the lint step checks that every access holds it.
#pragma once

#include <condition_variable>
#include <mutex>

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

}  // namespace lockstep
