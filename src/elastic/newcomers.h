// How processes that come to a job that runs find it, and are found.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "elastic/next_generation.h"

namespace lockstep::elastic {

// Chooses a newcomer's part of the model, where `row_size` ranks have a copy together: the part that the fewest of the
// newcomers that are not taken in yet have.
class ClaimedPart {
 public:
  // Claims a part for a process on `self`'s host. Throws ClusterError where no host of the job answers.
  ClaimedPart(const std::shared_ptr<cluster::ConnectedStores>& stores, const World& self, int row_size);

  int part() const { return part_; }

 private:
  const std::string name_;
  const std::shared_ptr<void> presence_;  // the claim counts while this lives
  int part_ = 0;
};

// A process that waits to be taken into training number `training` of a job.
class Candidate {
 public:
  // `description`: lines that must be the same for all members. Throws ClusterError where no host of the job answers.
  Candidate(std::shared_ptr<cluster::ConnectedStores> stores, const World& self, std::int64_t training,
            const std::string& description, int part = 0);

  // Returns an object that shows the others, while it lives, that this process does.
  const std::shared_ptr<void>& presence() const { return presence_; }

  // Waits until members take this process in, and returns its place among them; none where the training has ended:
  // another may follow. Calls poll() every second. Throws ClusterError where the members refuse it, or all have ended;
  // DeadlineExceeded; and what `poll` throws.
  std::optional<Members> wait(Deadline deadline, const std::function<void()>& poll);

 private:
  void enter(const std::vector<std::string>& stores);
  Members take(const std::string& invitation) const;
  void tell_refusal(const char* why) const;
  bool training_has_ended();

  const std::shared_ptr<cluster::ConnectedStores> stores_;
  const World self_;
  const std::int64_t training_;
  const Process process_;
  const std::string entry_;
  const std::shared_ptr<void> presence_;
  cluster::Liveness liveness_;
  std::set<std::string> entered_;  // the stores that have the entry
  int unanswered_ = 0;             // polls in a row that no host answered
};

// Tells newcomers and launchers who is a member now: in the store of this member's host, and from rank 0 also in the
// stores of hosts without members. Does not throw.
void publish(const Members& members, cluster::ConnectedStores& stores);

// A member's view of a training's newcomers, as its host's store lists them. Refuses newcomers that do not fit.
class Watch {
 public:
  Watch(std::shared_ptr<Registry> registry, std::int64_t training, const std::string& description, int row_size = 1);

  // Returns true where newcomers may wait. Any thread.
  bool any() const { return any_.load(std::memory_order_relaxed); }

  // Returns the newcomers that wait, have not gone and have not been invited, in whole rows. Any thread.
  std::vector<Process> waiting();

  // Forgets newcomers that were invited: they wait no more. Does not throw.
  void forget_invited();

  // Tells newcomers, now and later, that the training has ended; and the launchers, which members it had then. Does not
  // throw.
  static void tell_end(cluster::ConnectedStores& stores, std::int64_t training, const Members& members);

 private:
  void watch(const std::stop_token& stop);
  void add(const std::string& entry);
  bool was_answered(const Process& newcomer) const;

  const std::shared_ptr<Registry> registry_;
  cluster::Liveness liveness_;
  const std::int64_t training_;
  const std::string description_;
  const int row_size_;
  Mutex mutex_;
  std::vector<Process> seen_ LOCKSTEP_GUARDED_BY(mutex_);
  std::atomic<bool> any_ = false;
  std::jthread thread_;
};

}  // namespace lockstep::elastic
