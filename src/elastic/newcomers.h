// How processes that come to a job that runs find it, and are found.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "elastic/next_generation.h"
#include "lockstep/cluster/store.h"
#include "lockstep/cluster/world.h"

namespace lockstep::elastic {

// A process that waits to be taken into training number `training` of a job.
class Candidate {
 public:
  // `description`: lines that must be the same for all members. `first_size`: of the job's first generation.
  Candidate(const Store& store, const World& self, int first_size, std::int64_t training,
            const std::string& description);

  // While it lives, the others see that this process does.
  const std::shared_ptr<void>& presence() const { return presence_; }

  // Waits until members take it in: its place among them. Throws ClusterError where they refuse it, the training has
  // ended, or all members have, DeadlineExceeded, and what `poll` throws, which is called every second.
  Members wait(Deadline deadline, const std::function<void()>& poll);

 private:
  void require_members() const;

  const Store store_;
  const World self_;
  const int first_size_;
  const std::int64_t training_;
  const std::string name_;
  const std::shared_ptr<void> presence_;
};

// A member's view of the newcomers to a training. Those that do not fit are refused.
class Watch {
 public:
  Watch(const Store& store, std::int64_t training, const std::string& description);

  // Whether some may wait. Any thread.
  bool any() const { return any_.load(std::memory_order_relaxed); }

  // Those that wait, have not gone, and have not been invited. Any thread.
  std::vector<Newcomer> waiting();

  // After some were: they wait no more. Does not throw.
  void forget_invited();

  // Tells newcomers, now and later, that the training has ended, and the launcher which members it had then. Does not
  // throw.
  static void tell_end(const Store& store, std::int64_t training, const Members& members);

 private:
  void watch(const std::stop_token& stop);
  void add(const std::string& entry);

  const Store store_;
  const std::string entry_;  // of a newcomer that fits, behind its name and host
  Mutex mutex_;
  std::vector<Newcomer> seen_ LOCKSTEP_GUARDED_BY(mutex_);
  std::atomic<bool> any_ = false;
  std::jthread thread_;
};

}  // namespace lockstep::elastic
