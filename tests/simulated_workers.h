// For tests: the workers of an elastic job, as threads of one process. Their job is a table in memory, and their Groups
// are of threads. So a worker can be lost at each collective operation, and at each change of the members.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/simulated_job.h"

namespace lockstep::simulated {

class Job::Training final : public elastic::OpenTraining {
 public:
  Training(Job& job, int worker, std::int64_t number, std::string description)
      : job_(job), worker_(worker), number_(number), description_(std::move(description)) {}

  bool newcomers_wait() override { return !newcomers().empty(); }

  std::vector<elastic::Process> newcomers() override {
    const std::lock_guard lock(job_.mutex_);
    std::vector<elastic::Process> waiting;
    if (job_.workers_[at(worker_)].rank != 0) return waiting;
    for (std::size_t i = 0; i < job_.workers_.size(); ++i) {
      const auto& waits_for = job_.workers_[i].waits_for;
      if (!waits_for || waits_for->first != number_) continue;
      job_.expect(waits_for->second == description_, "a newcomer describes its training by other words");
      waiting.push_back({name_of(static_cast<int>(i)), text("host-", i)});
    }
    return waiting;
  }

  void on_change() override {}

  void end() override {
    const std::lock_guard lock(job_.mutex_);
    job_.ended_trainings_.insert(number_);
    job_.changed_.notify_all();
  }

 private:
  Job& job_;
  const int worker_;
  const std::int64_t number_;
  const std::string description_;
};

class Job::OfWorker final : public elastic::Membership {
 public:
  OfWorker(Job& job, int worker) : job_(job), worker_(worker) { take_members(); }

  const elastic::Members& members() const override { return members_; }
  bool is_newcomer() const override { return job_.is_newcomer(worker_); }

  Group group(const GroupOptions&) const override {
    job_.come_to_place(worker_);
    const std::lock_guard lock(job_.mutex_);
    if (job_.is_newcomer(worker_)) return make_thread_groups(1)[0];
    const auto& self = job_.workers_[at(worker_)];
    return job_.generations_[at(self.generation)]->groups[at(self.rank)];
  }
  Group replica_group(int, int, const GroupOptions&) const override { throw Error("these workers have one replica"); }
  void fail_waiters(const std::string&) const override {}

  bool wait_for_place(std::int64_t training, const std::string& description, Deadline,
                      const std::function<void()>& poll) override {
    job_.begin_to_count(worker_);
    job_.come_to_place(worker_);
    poll();
    std::unique_lock lock(job_.mutex_);
    auto& self = job_.workers_[at(worker_)];
    self.waits_for = {training, description};
    job_.changed_.notify_all();
    job_.changed_.wait(lock, [&] {
      return self.has_place || job_.ended_trainings_.contains(training) || job_.all_members_have_ended();
    });
    self.waits_for.reset();
    if (!self.has_place && !job_.ended_trainings_.contains(training))
      throw ClusterError("all that were in the training have ended");
    return self.has_place;
  }

  void take_place() override {
    take_members();
    job_.come_to_place(worker_);
  }

  void regroup(elastic::Change change, Deadline) override {
    job_.come_to_place(worker_);
    {
      std::unique_lock lock(job_.mutex_);
      const int number = job_.workers_[at(worker_)].generation;
      auto& now = *job_.generations_[at(number)];
      for (const int rank : change.lost) {
        job_.expect(job_.is_gone(now.workers[at(rank)]),
                    text("rank ", rank, " of generation ", number, " is taken for lost, and lives"));
      }
      now.wanted[worker_] = change;
      job_.make_next(number);
      if (!job_.changed_.wait_for(lock, std::chrono::duration<double>(kSeconds), [&] { return now.has_next; })) {
        job_.expect(false, text(name_of(worker_), " waits for the next generation after ", number));
        throw ClusterError("the others do not come to the next generation");
      }
    }
    if (!change.leaves) take_members();
    job_.come_to_place(worker_);
  }

  std::unique_ptr<elastic::OpenTraining> open(std::int64_t number, const std::string& description) override {
    return std::make_unique<Training>(job_, worker_, number, description);
  }

  std::function<std::optional<int>()> watch_for_losses() const override {
    return [] { return std::optional<int>(); };
  }
  void tell_failure(std::int64_t, const std::exception&) const override {}
  void require_fewer_than_two_failures(std::int64_t) const override {}

 private:
  void take_members() {
    const std::lock_guard lock(job_.mutex_);
    members_ = {};
    const auto add = [&](int worker) { members_.processes.push_back({name_of(worker), text("host-", worker)}); };
    if (job_.is_newcomer(worker_)) return add(worker_);
    const auto& self = job_.workers_[at(worker_)];
    const auto& generation = *job_.generations_[at(self.generation)];
    for (const int worker : generation.workers) add(worker);
    members_.world = {.rank = self.rank,
                      .size = static_cast<int>(generation.workers.size()),
                      .host = text("host-", worker_),
                      .generation = self.generation};
  }

  Job& job_;
  const int worker_;
  elastic::Members members_;
};

inline std::shared_ptr<elastic::Membership> Job::membership_of(int worker) {
  return std::make_shared<OfWorker>(*this, worker);
}

}  // namespace lockstep::simulated
