// How processes that come to a job that runs find it, and are found.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "elastic/next_generation.h"
#include "lockstep/cluster/store.h"
#include "lockstep/cluster/world.h"

namespace lockstep::elastic {

// A process that waits to be taken into training number `training` of a job. While it lives, it shows that it is there.
class Candidate {
 public:
  // `description`: lines that must be the same for all members.
  Candidate(const Store& store, const World& self, std::int64_t training, const std::string& description);
  ~Candidate();
  Candidate(const Candidate&) = delete;
  Candidate& operator=(const Candidate&) = delete;

  // Waits until members take it in: its World. Throws ClusterError where they refuse it or the training has ended,
  // DeadlineExceeded, and what `look` throws, which is called every second.
  World wait(Deadline deadline, const std::function<void()>& look);

 private:
  void show(const std::stop_token& stop) const;

  const Store store_;
  const World self_;
  const std::int64_t training_, number_;
  std::jthread shows_;
};

// A member's view of the newcomers to a training. Those that do not fit are refused.
class Watch {
 public:
  Watch(const Store& store, std::int64_t training, const std::string& description);

  // Whether some may wait. Any thread.
  bool any() const { return any_.load(std::memory_order_relaxed); }

  // Those that wait, show that they are there, and have not been invited. Any thread.
  std::vector<Newcomer> waiting();

  // Tells newcomers, now and later, that the training has ended. Does not throw.
  static void tell_end(const Store& store, std::int64_t training);

 private:
  struct Seen {
    Newcomer newcomer;
    std::int64_t signs = 0;  // of life
    Deadline lost_at;
  };
  void watch(const std::stop_token& stop);
  void add(std::int64_t number, const std::string& entry);

  const Store store_;
  const std::string entry_;  // of a newcomer that fits, behind its host
  Mutex mutex_;
  std::map<std::int64_t, Seen> seen_ LOCKSTEP_GUARDED_BY(mutex_);  // [number]
  std::atomic<bool> any_ = false;
  std::jthread thread_;
};

}  // namespace lockstep::elastic
