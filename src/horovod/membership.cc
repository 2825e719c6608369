#include "horovod/membership.h"

#include <csignal>
#include <utility>

#include "base/text.h"
#include "elastic/group_of_generation.h"
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
    : membership_(cluster.joins ? Job::newcomer(cluster, options.group.timeout_seconds)
                                : Job(cluster, options.group.timeout_seconds)),
      options_(options) {
  if (!cluster.joins) return;
  const auto deadline = Deadline::after(std::chrono::duration<double>(options.group.timeout_seconds));
  if (!membership_.wait_for_place(kTraining, description(), deadline, [] {}))
    throw ClusterError("the training that this process was to join has ended");
  membership_.take_place();
  lacks_state_ = true;
}

std::shared_ptr<Membership> Membership::current() { return current_membership(); }
void Membership::set(std::shared_ptr<Membership> membership) { current_membership() = std::move(membership); }

std::shared_ptr<Session> Membership::make_session() {
  const bool is_first = membership_.job().world().generation == 0;
  auto options = options_.group;
  options.lost_host_seconds = kLostHostSeconds;
  if (!is_first) options.timeout_seconds = options_.regroup_seconds;
  const auto group = is_first ? membership_.job().group(options)
                              : ::lockstep::elastic::group_of_generation(membership_.job(), options);
  return session_of(membership_.job().world(), group, options_.timeout_seconds);
}

// A process that comes later may lose a rank while it joins the others: it then regroups without that rank.
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
  return ::lockstep::elastic::lost_in(error, membership_.job().world().generation);
}

std::shared_ptr<void> Membership::on_regroup(std::function<void()> call) {
  on_regroup_->push_back(std::move(call));
  return {nullptr, [calls = on_regroup_, place = std::prev(on_regroup_->end())](void*) { calls->erase(place); }};
}

void Membership::begin_training() {
  signals_.emplace(true);
  training_.emplace(membership_, kTraining, description());
}

void Membership::end_training() {
  signals_.reset();
  if (training_) training_->end();
  training_.reset();
}

std::array<double, 3> Membership::says() {
  signal_ = signals_ ? signals_->received() : 0;
  return {training_ && training_->newcomers_wait() ? 1.0 : 0.0, signal_ == SIGTERM ? 1.0 : 0.0,
          signal_ == SIGINT ? 1.0 : 0.0};
}

bool Membership::changes(const std::array<double, 3>& sums) {
  const auto [newcomers, leaving, interrupted] = sums;
  if (interrupted > 0 || leaving == membership_.job().size()) {
    end_training();
    throw Interrupted(interrupted > 0 ? SIGINT : SIGTERM);
  }
  return newcomers + leaving > 0;
}

void Membership::regroup(std::vector<int> lost) {
  ::lockstep::elastic::Change change{.lost = std::move(lost), .leaves = signal_ == SIGTERM};
  if (training_ && change.lost.empty()) change.newcomers = training_->newcomers();
  Session::set(nullptr);
  while (true) {
    try {
      membership_.regroup(change, options_.regroup_seconds);
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
  if (training_) training_->on_change();
}

}  // namespace lockstep::horovod
