// This process as a member of an elastic job, and a training of the job that others may join.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "elastic/newcomers.h"
#include "lockstep/elastic/job.h"

namespace lockstep::elastic {

// Shows the others that this process lives, joins a job that runs, and goes from one generation of the job to the next.
//
// One thread.
class Membership {
 public:
  // `row_size`: how many members have a copy of the model together. `part`: which part of it this process has, or is
  // to have.
  explicit Membership(Job job, int row_size = 1, int part = 0);

  const Job& job() const { return job_; }  // of this generation
  const Members& members() const { return job_.members(); }
  ConnectedStores& stores() const { return *job_.stores(); }
  int row_size() const { return row_size_; }

  // A newcomer waits here until the members in training number `training` give it a place; poll() is called every
  // second. All members must give the same lines of `description`. Returns false where the training has ended; another
  // training may follow. Throws what Candidate's functions throw. After true, take_place makes the newcomer a member.
  bool wait_for_place(std::int64_t training, const std::string& description, Deadline deadline,
                      const std::function<void()>& poll);
  void take_place();

  // The next generation of the job. Collective; throws what Job::regroup throws.
  void regroup(Change change, double timeout_seconds);

 private:
  Job job_;
  const int row_size_, part_;
  std::shared_ptr<void> presence_;  // the others see that this process lives
  std::optional<Members> place_;    // that a newcomer has been given, and has not taken yet
};

// A training in which this process takes part. While it is open, the first member of each host sees newcomers.
//
// One thread.
class OpenTraining {
 public:
  OpenTraining(const Membership& membership, std::int64_t number, std::string description);

  // Returns true where newcomers wait. Only the first member of each host sees them; the others get false.
  bool newcomers_wait();

  // Those that wait; none where the store is slow: they are taken in later.
  std::vector<Process> newcomers();

  // After a change of the members, which may have taken in newcomers.
  void on_change();

  // It has ended for all, and nobody can join it any more: the first member tells those that come. Does not throw.
  void end();

 private:
  void watch();

  const Membership& membership_;
  const std::int64_t number_;
  const std::string description_;
  std::optional<Watch> watch_;  // of the first member of a host
};

}  // namespace lockstep::elastic
