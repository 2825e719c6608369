#include "horovod/membership.h"

#include <csignal>
#include <utility>

#include "base/text.h"
#include "collective/group_of_generation.h"
#include "elastic/next_generation.h"
#include "lockstep/base/error.h"
#include "lockstep/base/version.h"

namespace lockstep::horovod {
namespace {

constexpr double kLostHostSeconds = 3;
constexpr std::int64_t kTraining = 0;  // a program has one

std::shared_ptr<Membership>& current_membership() {
  static std::shared_ptr<Membership> membership;
  return membership;
}

std::string description() { return text("Lockstep ", version(), "\nhvd::elastic"); }

}  // namespace

Membership::Membership(const Cluster& cluster, const InitOptions& options)
    : job_(cluster.joins ? Job::newcomer(cluster, options.group.timeout_seconds)
                         : Job(cluster, options.group.timeout_seconds)),
      options_(options) {
  if (!cluster.joins) {
    presence_ = ::lockstep::elastic::show_presence(job_.stores()->here(), job_.members().self().name);
    return;
  }
  ::lockstep::elastic::Candidate candidate(job_.stores(), job_.world(), kTraining, description());
  const auto members =
      candidate.wait(Deadline::after(std::chrono::duration<double>(options.group.timeout_seconds)), [] {});
  if (!members) throw ClusterError("the training that this process was to join has ended");
  presence_ = candidate.presence();
  job_ = job_.joined(*members);
  lacks_state_ = true;
}

std::shared_ptr<Membership> Membership::current() { return current_membership(); }
void Membership::set(std::shared_ptr<Membership> membership) { current_membership() = std::move(membership); }

std::shared_ptr<Session> Membership::make_session() {
  const bool is_first = job_.world().generation == 0;
  auto options = options_.group;
  options.lost_host_seconds = kLostHostSeconds;
  if (!is_first) options.timeout_seconds = options_.regroup_seconds;
  const auto group = is_first ? job_.group(options) : collective::group_of_generation(job_, options);
  return session_of(job_.world(), group, options_.timeout_seconds);
}

// Of those that a process which comes later finds, one may be lost meanwhile.
void Membership::begin() {
  std::vector<int> lost;
  try {
    return Session::set(make_session());
  } catch (const std::exception& error) {
    const auto ranks = lost_in(error);
    if (!ranks || !lacks_state_) throw;
    lost = *ranks;
  }
  regroup(std::move(lost));
}

std::optional<std::vector<int>> Membership::lost_in(const std::exception& error) const {
  return ::lockstep::elastic::lost_in(error, job_.world().generation);
}

std::shared_ptr<void> Membership::on_regroup(std::function<void()> call) {
  on_regroup_->push_back(std::move(call));
  return {nullptr, [calls = on_regroup_, place = std::prev(on_regroup_->end())](void*) { calls->erase(place); }};
}

void Membership::begin_training() {
  signals_.emplace(true);
  watch();
}

void Membership::watch() {
  if (!watch_ && job_.world().local_rank == 0) watch_.emplace(job_.registry(), kTraining, description());
}

void Membership::end_training() {
  signals_.reset();
  watch_.reset();
  if (job_.rank() == 0) ::lockstep::elastic::Watch::tell_end(*job_.stores(), kTraining, job_.members());
}

std::array<double, 3> Membership::says() {
  signal_ = signals_ ? signals_->received() : 0;
  return {watch_ && watch_->any() ? 1.0 : 0.0, signal_ == SIGTERM ? 1.0 : 0.0, signal_ == SIGINT ? 1.0 : 0.0};
}

bool Membership::changes(const std::array<double, 3>& sums) {
  const auto [newcomers, leaving, interrupted] = sums;
  if (interrupted > 0 || leaving == job_.size()) {
    end_training();
    throw Interrupted(interrupted > 0 ? SIGINT : SIGTERM);
  }
  return newcomers + leaving > 0;
}

void Membership::regroup(std::vector<int> lost) {
  ::lockstep::elastic::Change change{.lost = std::move(lost), .leaves = signal_ == SIGTERM};
  try {
    if (watch_ && change.lost.empty()) change.newcomers = watch_->waiting();
  } catch (const DeadlineExceeded&) {  // the store is slow: they are taken in later
  }
  Session::set(nullptr);
  while (true) {
    try {
      job_ = job_.regroup(change, Deadline::after(std::chrono::duration<double>(options_.regroup_seconds)));
      if (change.leaves) throw Interrupted(SIGTERM);
      Session::set(make_session());
      for (const auto& call : *on_regroup_) call();
      break;
    } catch (const std::exception& error) {
      const auto others = lost_in(error);
      if (!others) throw;
      change = {.lost = *others, .newcomers = {}, .leaves = change.leaves, .insists = true};
    }
  }
  if (watch_) watch_->forget_invited();
  if (signals_) watch();
}

}  // namespace lockstep::horovod
