#include "strategy/replica_threads.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#include "base/resources.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

thread_local const ReplicaThreads* running_on = nullptr;  // whose thread this is

// The cores of each replica, or empty lists where pinning would keep replicas off idle cores.
std::vector<std::vector<int>> shares_of_cpus(const ReplicaThreadsOptions& options) {
  const auto replicas = static_cast<std::size_t>(options.replicas);
  const auto cpus = allowed_cpus();
  std::vector<std::vector<int>> shares(replicas);
  if (replicas * static_cast<std::size_t>(options.threads_per_replica) != cpus.size()) return shares;
  for (std::size_t i = 0; i < cpus.size(); ++i) shares[i * replicas / cpus.size()].push_back(cpus[i]);
  return shares;
}

}  // namespace

ReplicaThreads::ReplicaThreads(ReplicaThreadsOptions options) {
  const auto shares = shares_of_cpus(options);
  for (int replica = 0; replica < options.replicas; ++replica) {
    threads_.emplace_back([this, replica, cpus = shares[static_cast<std::size_t>(replica)],
                           threads = options.threads_per_replica] { work(replica, cpus, threads); });
  }
}

ReplicaThreads::~ReplicaThreads() {
  MutexLock lock(mutex_);
  stopping_ = true;
  started_.notify_all();
}

void ReplicaThreads::run(const std::function<void(int)>& function) {
  if (running_on == this)
    throw InvalidArgument("run was called from within a step of the same strategy, which would wait for itself");
  const at::ThreadLocalState settings;
  const std::function<void(int)> task = [&](int replica) {
    const at::ThreadLocalStateGuard as_the_caller(settings);
    function(replica);
  };
  MutexLock lock(mutex_);
  task_ = &task;
  running_ = static_cast<int>(threads_.size());
  ++runs_;
  started_.notify_all();
  while (running_ > 0) ended_.wait(mutex_);
}

void ReplicaThreads::work(int replica, const std::vector<int>& cpus, int threads_per_replica) {
  running_on = this;
  if (!cpus.empty()) pin_current_thread(cpus);
  // Before this thread's first parallel region, and once: it also clears oneDNN's caches.
  at::set_num_threads(threads_per_replica);
  for (std::uint64_t done = 0;; ++done) {
    const auto* task = wait_for_task(done);
    if (task == nullptr) return;
    (*task)(replica);
    MutexLock lock(mutex_);
    if (--running_ == 0) ended_.notify_all();
  }
}

const std::function<void(int)>* ReplicaThreads::wait_for_task(std::uint64_t done) {
  MutexLock lock(mutex_);
  while (runs_ == done && !stopping_) started_.wait(mutex_);
  return runs_ == done ? nullptr : task_;
}

}  // namespace lockstep
