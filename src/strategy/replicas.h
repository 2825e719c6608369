// This process's replicas: their threads, devices, Groups and random numbers.
#pragma once

#include <ATen/DeviceGuard.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "lockstep/strategy/distributed_dataset.h"
#include "ops/replica_random.h"
#include "strategy/replica_threads.h"
#include "strategy/workers.h"

namespace lockstep::strategy {

class Replicas {
 public:
  // Both live longer.
  Replicas(const StrategySettings& settings, const Workers& workers);

  int count() const { return static_cast<int>(devices_.size()); }
  const std::vector<c10::Device>& devices() const { return devices_; }
  c10::Device device(int replica) const { return devices_[static_cast<std::size_t>(replica)]; }

  // Returns these replicas among those that share the data, by this topology: the strategy's, or a model's.
  internal::LocalReplicas among(const Topology& topology) const {
    return {devices_, topology.has_own_data() ? Communicator() : topology.data, topology.data};
  }

  // Calls function(replica) on every replica's thread. Where one throws, the Groups are aborted, so that the others
  // leave their collective operations. The first exception is rethrown. A new Group of this process's replicas takes
  // the place of the old.
  template <class Function>
  void run(const Function& function);

  // That replica uses them while it runs.
  ops::ReplicaRandom& random(int replica) const { return *random_[static_cast<std::size_t>(replica)]; }

  // Return replica `replica`'s handle of the Group of this process's replicas, and of all workers'. All replicas make
  // the second when they first ask for it, and anew after the workers have regrouped.
  const Group& local_group(int replica) const { return local_groups_[static_cast<std::size_t>(replica)]; }
  const Group& group(int replica) const;

  // Returns Communicators of `group` for gradients on GPUs, one for each of this process's replicas: the same ones at
  // each call. Collective over the workers, where these do not change. Not while replicas run.
  const std::vector<Communicator>& gradient_ranks();

  // Count the steps of all replicas that have ended: a call of this process's threads, or a compiled step. Any thread.
  void count_step() { ended_steps_.fetch_add(1, std::memory_order_relaxed); }
  std::uint64_t ended_steps() const { return ended_steps_.load(std::memory_order_relaxed); }

 private:
  // The Group of all workers' replicas, which is of no use any more once the workers have regrouped.
  struct GroupOfAll {
    std::optional<Group> group = {};
    std::int64_t regroups = 0;
  };

  const Group* made_group(int replica) const;  // null where the replicas have not made it since the workers regrouped
  int spin_rounds() const;
  void make_local_groups();
  void fail(int replica) const;  // for the exception that is handled

  const Workers& workers_;
  const int usable_cpus_;
  const std::optional<std::string> gpu_backend_;
  const double timeout_seconds_;
  std::vector<c10::Device> devices_;                         // [replica]
  std::vector<std::unique_ptr<ops::ReplicaRandom>> random_;  // [replica]
  std::vector<Group> local_groups_;                          // [replica]
  mutable std::vector<GroupOfAll> groups_;                   // [replica]: that replica's own
  std::vector<Communicator> gradient_ranks_;                 // [replica]; empty before gradient_ranks
  std::atomic<std::uint64_t> ended_steps_ = 0;
  ReplicaThreads threads_;
};

template <class Function>
void Replicas::run(const Function& function) {
  Mutex mutex;
  std::exception_ptr first;  // guarded by mutex
  threads_.run([&](int replica) {
    const at::OptionalDeviceGuard on_device(device(replica));
    try {
      function(replica);
    } catch (...) {
      {
        MutexLock lock(mutex);
        if (!first) first = std::current_exception();
      }
      // `first` is set before: what the others throw now is a consequence.
      fail(replica);
    }
  });
  if (!first) return;
  make_local_groups();
  std::rethrow_exception(first);
}

}  // namespace lockstep::strategy
