// The persistent threads on which replicas run.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace lockstep {

struct ReplicaThreadsOptions {
  int replicas = 1;
  int threads_per_replica = 1;  // that LibTorch's operators may use on each
};

// Each thread is pinned to its share of the cores when the replicas together use every core that the process may use.
class ReplicaThreads {
 public:
  explicit ReplicaThreads(ReplicaThreadsOptions options);
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  // Calls function(replica) on every thread at once, with the caller's thread-local settings of LibTorch (grad mode and
  // so on), and returns when all have ended. One caller at a time; not from within a replica. `function` must not
  // throw.
  void run(const std::function<void(int)>& function);

 private:
  void work(int replica, const std::vector<int>& cpus, int threads_per_replica);
  const std::function<void(int)>* wait_for_task(std::uint64_t done);

  Mutex mutex_;
  CondVar started_, ended_;
  const std::function<void(int)>* task_ LOCKSTEP_GUARDED_BY(mutex_) = nullptr;
  std::uint64_t runs_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  int running_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  bool stopping_ LOCKSTEP_GUARDED_BY(mutex_) = false;

  std::vector<std::jthread> threads_;  // last: they end before what they use
};

}  // namespace lockstep
