// The threads on which replicas run: the caller's for replica 0, persistent ones for the others.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "strategy/thread_barrier.h"

namespace lockstep::strategy {

struct ReplicaThreadsOptions {
  int replicas = 1;
  int threads_per_replica = 1;  // for LibTorch's operators on each
  std::vector<int> cpus;        // these replicas may use them together
  int spin_rounds = 0;          // how often a thread polls for the next task before it blocks
};

// When the replicas together use every one of their cores, each persistent thread is pinned to its share. The first
// share is left for the callers.
class ReplicaThreads {
 public:
  explicit ReplicaThreads(ReplicaThreadsOptions options);
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
