// The threads on which replicas run: the caller's for replica 0, persistent ones for the others.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "strategy/settings.h"

namespace lockstep::strategy {

// A barrier for threads that `abort` ends, which std::barrier lacks. A thread that waits for the next step blocks
// without polling. Any thread may call any method.
class ThreadBarrier {
 public:
  // For `size` threads; one that waits polls `spin` times before it blocks.
  ThreadBarrier(int size, int spin) : size_(size), spin_(spin) {}

  // Returns true when all threads have called wait as often as this one. What a thread wrote before its wait, every
  // thread sees after its own (release and acquire on generation_). Returns false once abort was called.
  bool wait();

  void abort();

 private:
  bool opened(std::uint32_t generation) const {
    return generation_.load(std::memory_order_acquire) != generation || aborted_.load(std::memory_order_acquire);
  }

  const int size_;
  const int spin_;

  // A cache line each: arrivals must not slow the threads that watch the generation.
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> generation_{0};
  std::atomic<bool> aborted_{false};

  alignas(64) Mutex mutex_;
  CondVar opened_;
  int sleepers_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
};

// When the replicas together use every one of their cores, each persistent thread is pinned to its share. The first
// share is left for the callers.
class ReplicaThreads {
 public:
  // `spin_rounds`: how often a thread polls for the next task before it blocks.
  ReplicaThreads(const StrategySettings& settings, int spin_rounds);
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  // Calls function(replica) on every thread at once, with the caller's thread-local settings of LibTorch (grad mode and
  // so on), and returns when all have ended. From then on LibTorch's operators use threads_per_replica threads in the
  // calling thread. Throws InvalidArgument where another thread's call has not ended, or a replica calls it. `function`
  // must not throw.
  void run(const std::function<void(int)>& function);

 private:
  void work(int replica, const std::vector<int>& cpus);

  const int threads_per_replica_;
  ThreadBarrier started_, ended_;
  std::atomic<bool> busy_ = false;
  const std::function<void(int)>* task_ = nullptr;  // written before started_, read after it

  std::vector<std::jthread> threads_;  // last: they end before what they use
};

}  // namespace lockstep::strategy
