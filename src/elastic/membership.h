// This process among those that train together, how they change while an elastic training runs, and when members end.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster/stores.h"
#include "elastic/members.h"
#include "elastic/next_generation.h"
#include "elastic/registry.h"
#include "lockstep/collective/make_group.h"
#include "lockstep/elastic/job.h"

namespace lockstep::elastic {

// When members end: by which exceptions of the program, and how the others hear of them.

// A member that fails alone may be on a machine that does not work: the others go on without it, as if it were lost.
// If two fail in one section, all end: the program would fail on all members, one after the other.

// Returns true where the exception is the program's, and not one of the job's members or their connections.
bool is_of_program(const std::exception& error);

// Returns the exception's text. Where the text names members by other numbers than the launcher does, the launcher's
// numbers follow.
std::string describe(const std::exception& error, const Members& members);

// Tells the others why this member failed. Call it before they can notice the failure in the section. Does not throw.
void tell_failure(cluster::Stores& stores, const Members& members, std::int64_t section, const std::exception& error);

// Throws Error with the reasons of both where two members, as this one's host knows, have failed in the section.
void require_fewer_than_two_failures(Registry& registry, std::int64_t section);

// A training in which this process takes part. While it is open, the first member of each host sees newcomers.
//
// One thread.
class OpenTraining {
 public:
  virtual ~OpenTraining() = default;

  // Returns true where newcomers wait. Only the first member of each host sees them; the others get false.
  virtual bool newcomers_wait() = 0;

  // Returns the newcomers that wait; none where the store is slow: they are taken in later.
  virtual std::vector<Process> newcomers() = 0;

  // Called after the members have changed, which may have taken in newcomers.
  virtual void on_change() = 0;

  // The training has ended for all: nobody can join it any more, as the first member tells newcomers. Does not throw.
  virtual void end() = 0;
};

// The processes that train together: members of a job, whose Groups they make. In an elastic job the members go from
// one generation to the next; else there is only one.
//
// One thread; any thread may call `fail_waiters` and `tell_failure`, but while the members change.
class Membership {
 public:
  virtual ~Membership() = default;

  virtual const Members& members() const = 0;  // of this generation
  const World& world() const { return members().world; }
  virtual bool is_newcomer() const = 0;  // this process has not taken its place among them yet

  // Make the Group of the members, and that of all their replicas (Job::replica_group). Collective. In later
  // generations than the first nobody waits for a member that goes meanwhile; PeerLost names it. Throw as make_group.
  virtual Group group(const GroupOptions& options) const = 0;
  virtual Group replica_group(int replicas, int replica, const GroupOptions& options) const = 0;

  // Members that wait for this one to make a group get a ClusterError with `reason`.
  virtual void fail_waiters(const std::string& reason) const = 0;

  // --- In an elastic job.

  // A newcomer waits here until the members in training number `training` give it a place; poll() is called every
  // second. All members must give the same lines of `description`. Returns false where the training has ended; another
  // training may follow. Throws what Candidate's functions throw. After true, take_place makes the newcomer a member.
  virtual bool wait_for_place(std::int64_t training, const std::string& description, Deadline deadline,
                              const std::function<void()>& poll) = 0;
  virtual void take_place() = 0;

  // Makes the next generation of the job. Collective; throws what Job::regroup throws.
  virtual void regroup(Change change, Deadline deadline) = 0;

  // Opens training number `number` of the job.
  virtual std::unique_ptr<OpenTraining> open(std::int64_t number, const std::string& description) = 0;

  // Returns a function for any thread, which returns the first rank of this generation, but this one's, that has gone.
  virtual std::function<std::optional<int>()> watch_for_losses() const = 0;

  // Do what the functions in elastic/membership.h do.
  virtual void tell_failure(std::int64_t section, const std::exception& error) const = 0;
  virtual void require_fewer_than_two_failures(std::int64_t section) const = 0;

  // This process trains no more: the others see that it has gone. Does not throw.
  virtual void leave() {}
};

// The members of a Job.
class JobMembership final : public Membership {
 public:
  // Makes the membership of a job with one generation.
  explicit JobMembership(Job job) : job_(std::move(job)) {}

  // Makes that of an elastic job: shows the others that this process lives. `row_size`: how many members share a copy
  // of the model. `part`: the part of the copy that this process has, or is to have.
  JobMembership(Job job, int row_size, int part);

  const Job& job() const { return job_; }  // of this generation
  const Members& members() const override { return job_.members(); }
  bool is_newcomer() const override { return job_.is_newcomer(); }
  Group group(const GroupOptions& options) const override;
  Group replica_group(int replicas, int replica, const GroupOptions& options) const override {
    return job_.replica_group(replicas, replica, options);
  }
  void fail_waiters(const std::string& reason) const override { job_.fail_waiters(reason); }

  bool wait_for_place(std::int64_t training, const std::string& description, Deadline deadline,
                      const std::function<void()>& poll) override;
  void take_place() override;
  void regroup(Change change, Deadline deadline) override;
  std::unique_ptr<OpenTraining> open(std::int64_t number, const std::string& description) override;
  std::function<std::optional<int>()> watch_for_losses() const override;
  void tell_failure(std::int64_t section, const std::exception& error) const override;
  void require_fewer_than_two_failures(std::int64_t section) const override;
  void leave() override { presence_.reset(); }

 private:
  Job job_;  // of this generation
  const int row_size_ = 1, part_ = 0;
  std::shared_ptr<void> presence_;  // the others see that this process lives
  std::optional<Members> place_;    // given to a newcomer, which has not taken it yet
};

}  // namespace lockstep::elastic
