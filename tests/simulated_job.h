// For tests: the job of simulated workers (tests/simulated_workers.h), a table in memory.
#pragma once

#include <ATen/Context.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.h"
#include "collective/wrappers/wrapper.h"
#include "elastic/membership.h"
#include "lockstep/base/error.h"
#include "strategy/strategy_impl.h"

namespace lockstep::simulated {

// Thrown in a worker that is lost, at each place that it comes to from then on.
struct Lost : Interrupted {
  Lost() : Interrupted(SIGKILL) {}
};

// The fate of a worker. Places are counted from when it trains: before and after each of its collective operations, and
// in each change of the members.
struct Fate {
  int lost_at = 0;       // the number of the place; 0: never
  int begins_after = 0;  // a newcomer: after how many places of all workers; 0: there from the beginning
};

class Job {
 public:
  Job(unsigned seed, const std::vector<Fate>& fates) : random_(seed) {
    for (const auto& fate : fates) {
      workers_.push_back({.fate = fate});
      if (fate.begins_after == 0) first_.push_back(static_cast<int>(workers_.size()) - 1);
    }
    generations_.push_back(make_generation(first_));
  }

  // Runs body(strategy) on every worker at once. Element i is what worker i threw, or empty; "lost": it was.
  std::vector<std::string> run(const strategy::StrategySettings& settings,
                               const std::function<void(int worker, const Strategy&)>& body) {
    std::vector<std::string> errors(workers_.size());
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      threads.emplace_back([&, i] {
        const int worker = static_cast<int>(i);
        wait_to_begin(worker);
        try {
          auto all = settings;
          all.devices = {at::hasCUDA() ? text("cuda:", worker) : "cpu:0"};
          all.threads_per_replica = 1;
          all.timeouts.step = kSeconds;
          all.workers->membership = membership_of(worker);
          body(worker, Strategy(std::make_shared<StrategyImpl>(std::move(all))));
        } catch (const Lost&) {
          errors[i] = "lost";
        } catch (const std::exception& error) {
          errors[i] = is_lost(worker) ? "lost" : error.what();
        }
        end(worker);
      });
    }
    threads.clear();
    return errors;
  }

  // Counts the calling worker's places from here on, where it trains: it may be lost.
  void begin_to_count(int worker) {
    const std::lock_guard lock(mutex_);
    workers_[at(worker)].counts = true;
  }

  // The calling worker is lost at a place from here on: at the first, or after so many others. Throws Lost where that
  // is here (`places` is 0).
  void lose(int worker, int places) {
    {
      const std::lock_guard lock(mutex_);
      auto& self = workers_[at(worker)];
      self.counts = true;
      self.fate.lost_at = self.places + std::max(1, places);
    }
    if (places == 0) come_to_place(worker);
  }

  // Lets a newcomer begin, and waits until it waits for a place.
  void call_newcomer(int worker) {
    std::unique_lock lock(mutex_);
    auto& self = workers_[at(worker)];
    self.fate.begins_after = 1;
    changed_.notify_all();
    const bool came = changed_.wait_for(lock, std::chrono::duration<double>(kSeconds),
                                        [&] { return self.waits_for || self.has_place; });
    expect(came, "a newcomer does not come");
  }

  // Return how many places all workers have come to; and what was wrong in their use of the job, or an empty text.
  int places() const { return places_; }
  const std::string& problem() const { return problem_; }

 private:
  static constexpr double kSeconds = 60;  // until a test that hangs fails

  struct Worker {
    Fate fate;
    bool counts = false;
    int places = 0;
    bool lost = false, ended = false;
    int generation = 0;
    int rank = 0;
    std::optional<std::pair<std::int64_t, std::string>> waits_for;  // a newcomer's training, and its description
    bool has_place = false;
  };

  struct Generation {
    std::vector<int> workers;               // [rank]
    std::vector<Group> groups;              // [rank]
    std::map<int, elastic::Change> wanted;  // [worker]: those that have ended this generation
    bool has_next = false;
  };

  class OfWorker;
  class Training;

  // The worker comes to a place before and after each operation. An operation that some completed may fail on others.
  class Operations final : public collective::Wrapper {
   private:
    template <class Act>
    const char* between_places(const Act& act) {
      job_.come_to_place(worker_);
      const char* const algorithm = act();
      job_.come_to_place(worker_);
      job_.may_fail_after_a_loss(generation_);
      return algorithm;
    }

   public:
    Operations(std::shared_ptr<GroupBackend> inner, Job& job, int generation, int worker)
        : Wrapper(std::move(inner)), job_(job), generation_(generation), worker_(worker) {}

    std::int64_t generation() const override { return generation_; }
    const char* run(const Call& call, Deadline deadline) override {
      return between_places([&] { return Wrapper::run(call, deadline); });
    }
    const char* exchange(std::span<const Call> calls, Deadline deadline) override {
      return between_places([&] { return Wrapper::exchange(calls, deadline); });
    }
    // Both places come before: what is enqueued uses the worker's memory later, and its caller must have it until then.
    EnqueuedCalls enqueue(std::span<const Call> calls, Deadline deadline) override {
      for (int place = 0; place < 2; ++place) job_.come_to_place(worker_);
      return Wrapper::enqueue(calls, deadline);
    }

   private:
    Job& job_;
    const int generation_, worker_;
  };

  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  static std::string name_of(int worker) { return text("worker-", worker); }

  std::shared_ptr<elastic::Membership> membership_of(int worker);

  std::unique_ptr<Generation> make_generation(const std::vector<int>& of) {
    auto made = std::make_unique<Generation>();
    const auto number = static_cast<int>(generations_.size());
    made->workers = of;
    const auto groups = make_thread_groups(static_cast<int>(of.size()));
    for (std::size_t rank = 0; rank < of.size(); ++rank) {
      auto& worker = workers_[at(of[rank])];
      made->groups.push_back(groups[rank].with_backend(
          std::make_shared<Operations>(groups[rank].shared_backend(), *this, number, of[rank])));
      worker.generation = number;
      worker.rank = static_cast<int>(rank);
    }
    return made;
  }

  bool is_lost(int worker) {
    const std::lock_guard lock(mutex_);
    return workers_[at(worker)].lost;
  }

  void wait_to_begin(int worker) {
    std::unique_lock lock(mutex_);
    const auto& self = workers_[at(worker)];
    changed_.wait(lock, [&] { return places_ >= self.fate.begins_after || all_members_have_ended(); });
  }

  bool all_members_have_ended() const {
    const auto& members = generations_.back()->workers;
    return std::all_of(members.begin(), members.end(), [&](int member) { return is_gone(member); });
  }
  bool is_gone(int worker) const { return workers_[at(worker)].lost || workers_[at(worker)].ended; }

  void come_to_place(int worker) {
    const std::lock_guard lock(mutex_);
    auto& self = workers_[at(worker)];
    if (self.lost) throw Lost();
    if (!self.counts) return;
    ++places_;
    changed_.notify_all();
    if (++self.places != self.fate.lost_at) return;
    self.lost = true;
    leave(worker, "lost");
    throw Lost();
  }

  // With `mutex_` held: nobody waits for the worker any more.
  void leave(int worker, const char* how) {
    const auto& self = workers_[at(worker)];
    if (!is_newcomer(worker)) {
      const auto& group = generations_[at(self.generation)]->groups[at(self.rank)];
      group.shared_backend()->fail(Failure::peer_lost(self.rank, self.rank, how));
    }
    make_next(self.generation);
    changed_.notify_all();
  }

  void end(int worker) {
    const std::lock_guard lock(mutex_);
    auto& self = workers_[at(worker)];
    self.ended = true;
    self.waits_for.reset();
    leave(worker, "its process ended");
  }

  // An operation that some have ended may fail on others, where a worker is lost that took part. A worker that ended by
  // itself has sent all that others wait for.
  void may_fail_after_a_loss(int generation) {
    const std::lock_guard lock(mutex_);
    const auto& members = generations_[at(generation)]->workers;
    const auto lost = std::find_if(members.begin(), members.end(), [&](int i) { return workers_[at(i)].lost; });
    if (lost == members.end() || random_() % 2 == 0) return;
    throw PeerLost(static_cast<int>(lost - members.begin()), generation, "before it said that it had received all");
  }

  bool is_newcomer(int worker) const {
    return workers_[at(worker)].fate.begins_after > 0 && !workers_[at(worker)].has_place;
  }

  // With `mutex_` held: makes the generation after `number`, once all of its workers that are left have come.
  void make_next(int number) {
    auto& generation = *generations_[at(number)];
    if (generation.has_next || number + 1 != static_cast<int>(generations_.size())) return;
    std::vector<int> next;
    bool anyone = false;
    for (const int member : generation.workers) {
      if (is_gone(member)) continue;
      const auto wanted = generation.wanted.find(member);
      if (wanted == generation.wanted.end()) return;
      anyone = true;
      if (!wanted->second.leaves) next.push_back(member);
    }
    if (!anyone) return;
    generation.has_next = true;
    for (const auto& [member, change] : generation.wanted) {
      if (change.newcomers.empty() || is_gone(member)) continue;
      for (const auto& newcomer : change.newcomers) {
        const int worker = std::stoi(newcomer.name.substr(newcomer.name.find('-') + 1));
        if (!workers_[at(worker)].waits_for || is_gone(worker)) continue;
        workers_[at(worker)].has_place = true;
        workers_[at(worker)].waits_for.reset();
        next.push_back(worker);
      }
      break;
    }
    generations_.push_back(make_generation(next));
    changed_.notify_all();
  }

  void expect(bool holds, const std::string& otherwise) {
    if (!holds && problem_.empty()) problem_ = otherwise;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937 random_;
  std::vector<Worker> workers_;
  std::vector<int> first_;  // there from the beginning
  std::vector<std::unique_ptr<Generation>> generations_;
  std::set<std::int64_t> ended_trainings_;
  int places_ = 0;
  std::string problem_;
};

}  // namespace lockstep::simulated
