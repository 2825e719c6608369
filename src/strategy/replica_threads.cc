#include "strategy/replica_threads.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <mutex>
#include <system_error>

#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep::strategy {
namespace {

thread_local std::vector<const ReplicaThreads*> running;  // of the steps that this thread is in, the innermost last

// Serializes the calls: in a forked process LibTorch's first call makes its thread pool anew, which is not thread-safe.
void set_threads_of_operators(int threads) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  at::set_num_threads(threads);
}

// Returns the cores of each replica, or empty lists where pinning would keep replicas off idle cores.
std::vector<std::vector<int>> shares_of_cpus(const StrategySettings& settings) {
  const auto replicas = settings.devices.size();
  const auto cpus = settings.partition.cpus();  // these replicas may use them together
  std::vector<std::vector<int>> shares(replicas);
  if (replicas * static_cast<std::size_t>(settings.threads_per_replica) != cpus.size()) return shares;
  for (std::size_t i = 0; i < cpus.size(); ++i) shares[i * replicas / cpus.size()].push_back(cpus[i]);
  return shares;
}

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

bool ThreadBarrier::wait() {
  if (aborted_.load(std::memory_order_acquire)) return false;
  const auto generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    MutexLock lock(mutex_);
    generation_.store(generation + 1, std::memory_order_release);
    if (sleepers_ > 0) opened_.notify_all();
    return true;
  }
  for (int round = 0; round < spin_ && !opened(generation); ++round) pause_cpu();
  if (!opened(generation)) {
    MutexLock lock(mutex_);
    ++sleepers_;
    while (!opened(generation)) opened_.wait(mutex_);
    --sleepers_;
  }
  return generation_.load(std::memory_order_acquire) != generation;
}

void ThreadBarrier::abort() {
  MutexLock lock(mutex_);
  aborted_.store(true, std::memory_order_release);
  opened_.notify_all();
}

ReplicaThreads::ReplicaThreads(const StrategySettings& settings, int spin_rounds)
    : threads_per_replica_(settings.threads_per_replica),
      started_(static_cast<int>(settings.devices.size()), spin_rounds),
      ended_(static_cast<int>(settings.devices.size()), spin_rounds) {
  const auto shares = shares_of_cpus(settings);
  const auto replicas = static_cast<int>(shares.size());
  for (int replica = 1; replica < replicas; ++replica) {
    try {
      threads_.emplace_back([this, replica, cpus = shares[static_cast<std::size_t>(replica)]] { work(replica, cpus); });
    } catch (const std::system_error& error) {
      started_.abort();  // ends the threads that were started
      throw Error(text("cannot start the thread of replica ", replica, " of ", replicas, ": ", error.what(),
                       "; take fewer replicas, or raise the limit (ulimit -u)"));
    }
  }
}

ReplicaThreads::~ReplicaThreads() { started_.abort(); }

void ReplicaThreads::run(const std::function<void(int)>& function) {
  if (std::find(running.begin(), running.end(), this) != running.end())
    throw InvalidArgument("run was called from within a step of the same strategy, which would wait for itself");
  if (busy_.exchange(true))
    throw InvalidArgument("two threads run steps of one strategy at once; they must take turns");
  const auto at_end = c10::make_scope_exit([this] { busy_ = false; });
  // Sets the number only where it changes: setting it clears oneDNN's caches.
  const int threads_before = at::get_num_threads();
  if (threads_before != threads_per_replica_) set_threads_of_operators(threads_per_replica_);
  const at::ThreadLocalState settings;
  const std::function<void(int)> task = [&](int replica) {
    const at::ThreadLocalStateGuard as_the_caller(settings);
    function(replica);
  };
  task_ = &task;
  started_.wait();
  running.push_back(this);
  function(0);
  running.pop_back();
  ended_.wait();
  if (!running.empty() && threads_before != threads_per_replica_) set_threads_of_operators(threads_before);
}

void ReplicaThreads::work(int replica, const std::vector<int>& cpus) {
  running.push_back(this);
  if (!cpus.empty()) pin_current_thread(cpus);
  set_threads_of_operators(threads_per_replica_);  // before this thread's first parallel region
  while (started_.wait()) {
    (*task_)(replica);
    ended_.wait();
  }
}

}  // namespace lockstep::strategy
