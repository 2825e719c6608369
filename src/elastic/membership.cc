#include "elastic/membership.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "base/text.h"
#include "cluster/store_texts.h"
#include "elastic/newcomers.h"
#include "lockstep/base/error.h"

namespace lockstep::elastic {

namespace {

std::string key_of_failures(std::int64_t section) { return text("failures in section ", section); }

// Returns the list that is packed in the entry: the name of each member that failed, and after each name the reason.
std::vector<std::string> failures_in(const std::string& entry) {
  return cluster::unpack(entry).value_or(std::vector<std::string>());
}

void append(cluster::Stores& stores, const std::string& store, const std::string& key, const std::string& name,
            const std::string& reason) {
  for (std::string before;;) {
    auto failures = failures_in(before);
    if (std::find(failures.begin(), failures.end(), name) != failures.end()) return;
    failures.insert(failures.end(), {name, reason});
    const auto after = cluster::pack(failures);
    const auto kept = stores.compare_set(store, key, before, after);
    if (kept == after) return;
    before = kept;
  }
}

template <class... Kinds>
bool is_one_of(const std::exception& error) {
  return ((dynamic_cast<const Kinds*>(&error) != nullptr) || ...);
}

}  // namespace

bool is_of_program(const std::exception& error) {
  return !is_one_of<PeerLost, Aborted, DeadlineExceeded, ClusterError, Interrupted>(error);
}

std::string describe(const std::exception& error, const Members& members) {
  std::vector<int> ranks;
  if (const auto* const lost = dynamic_cast<const PeerLost*>(&error)) {
    if (lost->generation() == members.world.generation) ranks.push_back(lost->rank());
  } else if (const auto* const late = dynamic_cast<const DeadlineExceeded*>(&error)) {
    ranks = late->ranks();
  }
  return error.what() + launchers_ranks(members, ranks);
}

void tell_failure(cluster::Stores& stores, const Members& members, std::int64_t section, const std::exception& error) {
  const int rank = members.world.rank;
  const auto reason =
      text("worker ", rank, launchers_ranks(members, {rank}), " on ", members.world.host, ": ", error.what());
  std::vector<std::string> places;
  for (const auto& process : members.processes) add_store(places, process.store);
  stores.for_each(places.size(), [&](std::size_t i) {
    try {
      append(stores, places[i], key_of_failures(section), members.self().name, reason);
    } catch (const Error&) {  // that host is lost
    }
  });
}

void require_fewer_than_two_failures(Registry& registry, std::int64_t section) {
  std::vector<std::string> failures;
  try {
    failures = failures_in(registry.read_here(key_of_failures(section)));
  } catch (const Error&) {  // the store does not answer: then it is a loss
  }
  std::vector<std::string> reasons;
  for (std::size_t i = 1; i < failures.size(); i += 2) reasons.push_back(failures[i]);
  if (reasons.size() < 2) return;
  throw Error(text("the program failed on ", reasons.size(),
                   " workers in the same step, so that the others end too: ", join(reasons, "; ")));
}

namespace {

constexpr std::chrono::milliseconds kBetweenChecks(100);  // looks for members that have gone
constexpr std::chrono::seconds kToFindOut(15);            // until a loss is known: with etcd when a lease ends

// Makes job.group(options), but nobody waits for a member that goes meanwhile: PeerLost names it. Collective.
Group group_of_generation(const Job& job, const GroupOptions& options,
                          const std::function<std::optional<int>()>& lost) {
  const std::jthread watch([&](const std::stop_token& stop) {
    try {
      while (!stop_requested_by(Deadline::after(kBetweenChecks), stop)) {
        if (const auto rank = lost()) return job.fail_waiters(text("worker ", *rank, " is lost"));
      }
    } catch (const Error&) {  // the store is gone: job.group says so
    }
  });
  // A host that was just lost, with the store at which the members meet, counts as gone a little later.
  const auto require_loss = [&] {
    for (const auto until = Deadline::after(kToFindOut); !until.passed(); std::this_thread::sleep_for(kBetweenChecks)) {
      if (const auto rank = lost()) throw PeerLost(*rank, job.world().generation, "its process or its host is gone");
    }
  };
  try {
    return job.group(options);
  } catch (const PeerLost&) {
    throw;
  } catch (const DeadlineExceeded& late) {
    if (late.ranks().empty()) require_loss();
    throw;
  } catch (const ClusterError&) {
    require_loss();
    throw;
  }
}

class TrainingOfJob final : public OpenTraining {
 public:
  // `job`: a reference, always of the generation that runs.
  TrainingOfJob(const Job& job, int row_size, std::int64_t number, std::string description)
      : job_(job), row_size_(row_size), number_(number), description_(std::move(description)) {
    watch();
  }

  bool newcomers_wait() override {
    watch();
    return watch_ && watch_->any();
  }

  std::vector<Process> newcomers() override {
    try {
      if (watch_) return watch_->waiting();
    } catch (const DeadlineExceeded&) {
    }
    return {};
  }

  void on_change() override {
    if (watch_) watch_->forget_invited();
    watch();
  }

  void end() override {
    watch_.reset();
    if (job_.rank() == 0) Watch::tell_end(*job_.stores(), number_, job_.members());
  }

 private:
  // Watches where this member is the first of its host, which may be another one after each change.
  void watch() {
    if (!watch_ && job_.world().local_rank == 0) watch_.emplace(job_.registry(), number_, description_, row_size_);
  }

  const Job& job_;
  const int row_size_;
  const std::int64_t number_;
  const std::string description_;
  std::optional<Watch> watch_;  // where this member is the first of its host
};

}  // namespace

JobMembership::JobMembership(Job job, int row_size, int part) : job_(std::move(job)), row_size_(row_size), part_(part) {
  if (!is_newcomer()) presence_ = cluster::show_presence(job_.stores()->here(), members().self().name);
}

Group JobMembership::group(const GroupOptions& options) const {
  return world().generation == 0 ? job_.group(options) : group_of_generation(job_, options, watch_for_losses());
}

bool JobMembership::wait_for_place(std::int64_t training, const std::string& description, Deadline deadline,
                                   const std::function<void()>& poll) {
  Candidate candidate(job_.stores(), world(), training, description, part_);
  place_ = candidate.wait(deadline, poll);
  if (place_) presence_ = candidate.presence();
  return place_.has_value();
}

void JobMembership::take_place() {
  job_ = job_.joined(*place_);
  place_.reset();
}

void JobMembership::regroup(Change change, Deadline deadline) {
  change.row_size = row_size_;
  job_ = job_.regroup(change, deadline);
}

std::unique_ptr<OpenTraining> JobMembership::open(std::int64_t number, const std::string& description) {
  return std::make_unique<TrainingOfJob>(job_, row_size_, number, description);
}

std::function<std::optional<int>()> JobMembership::watch_for_losses() const {
  return [members = members(), liveness = std::make_shared<cluster::Liveness>(job_.stores())] {
    return first_lost(members, *liveness);
  };
}

void JobMembership::tell_failure(std::int64_t section, const std::exception& error) const {
  elastic::tell_failure(*job_.stores(), members(), section, error);
}

void JobMembership::require_fewer_than_two_failures(std::int64_t section) const {
  elastic::require_fewer_than_two_failures(*job_.registry(), section);
}

}  // namespace lockstep::elastic
