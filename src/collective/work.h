// The state of a Work handle, the thread that runs started operations, and the order of calls of several threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "collective/backend.h"
#include "lockstep/base/deadline.h"
#include "lockstep/collective/group.h"

namespace lockstep {

// Set once by the thread that carries the operation out. Of calls on a GPU: made when they are enqueued.
struct Work::State {
  void finish(std::exception_ptr error);

  Mutex mutex;
  CondVar finished;
  bool done LOCKSTEP_GUARDED_BY(mutex) = false;
  std::exception_ptr error LOCKSTEP_GUARDED_BY(mutex);
  EnqueuedCalls enqueued = {};  // constant; empty in host memory
};

namespace collective {

// Runs tasks in the order in which they were added, in one thread that begins with the first.
class ProgressThread {
 public:
  ProgressThread() = default;
  // Tasks that have not begun end with Aborted; the one that runs is waited for.
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // True while a task runs or waits.
  bool busy();

  // `prepare` is called under the queue's lock, so that its calls have the order of the tasks.
  Work add(const std::function<std::function<void()>()>& prepare);

 private:
  struct Task {
    std::function<void()> run;
    std::shared_ptr<Work::State> work;
  };

  void loop();

  Mutex mutex_;
  CondVar changed_;
  std::deque<Task> tasks_ LOCKSTEP_GUARDED_BY(mutex_);
  bool running_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool ends_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::jthread thread_;
};

}  // namespace collective

}  // namespace lockstep

namespace lockstep::collective {

// Calls of several threads, carried out one after the other in the order in which they took a number. Any thread may
// call anything. While nobody queues, taking a turn and passing it on are two atomic operations.
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
