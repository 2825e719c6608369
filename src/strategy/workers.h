// This process among the workers of its strategy.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "collective/refused_by_all.h"
#include "collective/topology.h"
#include "elastic/sections.h"
#include "strategy/settings.h"

namespace lockstep::strategy {

// One thread, while no replica runs. Replicas' threads may call topology, replica_group, tell_failure and fail.
class Workers {
 public:
  // Knows of this process alone; `settings` lives longer.
  explicit Workers(const StrategySettings& settings);
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Finds the others. Collective; throws as make_group does.
  void connect() { kind_.connect(topology_, *settings_, timeouts_); }

  // Divides the workers into the groups of WorkerSettings::per_group, if any. Collective, after connect.
  void form_groups();

  // The processes that train together, and this one's place among them: the workers.
  const Topology& topology() const { return topology_; }

  // The workers, as processes of a job. Null for a process alone, and for a mesh that was made of a Communicator.
  elastic::Membership* membership() const { return settings_ ? settings_->membership.get() : nullptr; }

  // Returns true where training may go on without workers that are lost.
  bool is_elastic() const { return settings_ && settings_->elastic; }
  const ElasticOptions& elastic() const { return *settings_->elastic; }

  // How the workers' Groups are made.
  const GroupOptions& group_options() const { return settings_->group; }

  // Goes on with the workers that remain and those that come: replaces the topology's Groups. Collective over them,
  // between runs. Throws what Membership::regroup and group throw; after an exception of `group` the job is of the next
  // generation.
  void regroup(const elastic::Change& change);

  // Takes the place that the workers have given this newcomer. Collective over them; they regroup.
  void join();

  // Returns a Group of all workers' replicas, for this process's replica. All replicas call it.
  Group replica_group(int replica) const;

  // Returns the hosts of topology().same_part, as they are now: [rank].
  std::vector<std::string> hosts() const;

  // Calls act(). Where it throws, the calls of the other `ranks` are aborted with the reason, unless all of them throw
  // (RefusedByAll). Workers of an elastic strategy go on without this one, unless two fail in one section
  // (elastic/membership.h).
  template <class Act>
  void abort_on_error(const Communicator& ranks, const Act& act) const;
  template <class Act>
  void abort_on_error(const Act& act) const {
    abort_on_error(topology_.all, act);
  }

  // Do what collective::check_on_all does, over the workers or other ranks. An elastic strategy calls check() alone:
  // the others go on without a worker that fails.
  void check_on_all(const std::function<void()>& check) const { check_on_all(topology_.all, "worker", check); }
  void check_on_all(const Communicator& ranks, const char* rank, const std::function<void()>& check) const {
    if (is_elastic()) return check();
    collective::check_on_all(ranks, rank, check);
  }

  // Returns the factor of the rates where each worker brings a batch of its own, for as many workers as there are.
  // Throws InvalidArgument where the user's rule returns no positive number.
  double learning_rate_factor() const;

  // Tells the workers that wait for this one that it fails, before its Groups are aborted: whoever notices that finds
  // the reason.
  void tell_failure(const std::exception& error) const;

  // Aborts `local`, the Group of this process's replicas, then the workers' Groups, and `of_all` replicas' where there
  // is one, so that nobody waits for this replica. The reason is the exception that is handled. Other workers find by
  // themselves that one is lost.
  void fail(int replica, const Group& local, const Group* of_all) const;

  // Returns the sections that this process has completed, in all trainings of this strategy.
  elastic::Sections::Completed& completed_sections() { return completed_sections_; }
  const elastic::Sections::Completed& completed_sections() const { return completed_sections_; }

  // Trainings that workers make are numbered, equally in all.
  std::int64_t next_training() { return trainings_++; }

 private:
  void abort_apart(const std::string& why) const;
  void reconnect();

  const Kind& kind_;
  const std::optional<WorkerSettings>& settings_;
  const std::optional<WorkerBatch>& batch_;
  const Timeouts timeouts_;
  Topology topology_;
  std::int64_t trainings_ = 0;
  elastic::Sections::Completed completed_sections_;
};

template <class Act>
void Workers::abort_on_error(const Communicator& ranks, const Act& act) const {
  std::exception_ptr of_all;  // thrown on all workers, whose Group is whole
  ranks.abort_on_error([&] {
    try {
      act();
    } catch (const StateLost&) {
      of_all = std::current_exception();
    } catch (const Interrupted&) {  // thrown on all workers, after a whole step
      throw;
    } catch (const std::exception& error) {
      const auto* const refusal = dynamic_cast<const collective::RefusedByAll*>(&error);
      if (refusal != nullptr && refusal->is_of(ranks)) {
        of_all = std::current_exception();
        return;
      }
      tell_failure(error);
      if (settings_ && settings_->per_group > 0) abort_apart(error.what());
      throw;
    }
  });
  if (of_all) std::rethrow_exception(of_all);
}

}  // namespace lockstep::strategy
