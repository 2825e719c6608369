#include "front_ends/horovod/generations.h"

#include <csignal>
#include <utility>

#include "base/text.h"
#include "elastic/next_generation.h"
#include "lockstep/base/error.h"
#include "lockstep/base/version.h"

namespace lockstep::horovod {
namespace {

constexpr std::int64_t kTraining = 0;  // a program has one

std::shared_ptr<Generations>& current_generations() {
  static std::shared_ptr<Generations> generations;
  return generations;
}

std::string description() { return text("Lockstep ", version(), "\nhvd::elastic"); }

}  // namespace

Generations::Generations(const Cluster& cluster, const InitOptions& options)
    : membership_(cluster.joins ? Job::newcomer(cluster, options.group.timeout_seconds)
                                : Job(cluster, options.group.timeout_seconds),
                  1, 0),
      options_(options),
      timeouts_{.start = options.group.timeout_seconds,
                .step = options.timeout_seconds,
                .regroup = options.regroup_seconds,
                .lost_host = kElasticLostHostSeconds} {
  if (!cluster.joins) return;
  const auto deadline = Deadline::after(std::chrono::duration<double>(timeouts_.start));
  if (!membership_.wait_for_place(kTraining, description(), deadline, [] {}))
    throw ClusterError("the training that this process was to join has ended");
  membership_.take_place();
  lacks_state_ = true;
}

std::shared_ptr<Generations> Generations::current() { return current_generations(); }
void Generations::set(std::shared_ptr<Generations> generations) { current_generations() = std::move(generations); }

std::shared_ptr<Session> Generations::make_session() {
  const auto& world = membership_.world();
  auto options = options_.group;
  options.lost_host_seconds = timeouts_.lost_host;
  options.timeout_seconds = world.generation > 0 ? timeouts_.regroup : timeouts_.start;
  return session_of(world, {membership_.group(options), timeouts_.step});
}

// A process that comes later may lose a rank while it joins the others: it then regroups without that rank.
void Generations::begin() {
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

std::optional<std::vector<int>> Generations::lost_in(const std::exception& error) const {
  return ::lockstep::elastic::lost_in(error, membership_.world().generation);
}

std::shared_ptr<void> Generations::on_regroup(std::function<void()> call) {
  on_regroup_->push_back(std::move(call));
  return {nullptr, [calls = on_regroup_, place = std::prev(on_regroup_->end())](void*) { calls->erase(place); }};
}

void Generations::begin_training() {
  signals_.emplace(true);
  training_ = membership_.open(kTraining, description());
}

void Generations::end_training() {
  signals_.reset();
  if (training_) training_->end();
  training_.reset();
}

std::array<double, 3> Generations::says() {
  signal_ = signals_ ? signals_->received() : 0;
  return {training_ && training_->newcomers_wait() ? 1.0 : 0.0, signal_ == SIGTERM ? 1.0 : 0.0,
          signal_ == SIGINT ? 1.0 : 0.0};
}

bool Generations::changes(const std::array<double, 3>& sums) {
  const auto [newcomers, leaving, interrupted] = sums;
  if (interrupted > 0 || leaving == membership_.world().size) {
    end_training();
    throw Interrupted(interrupted > 0 ? SIGINT : SIGTERM);
  }
  return newcomers + leaving > 0;
}

void Generations::regroup(std::vector<int> lost) {
  ::lockstep::elastic::Change change{.lost = std::move(lost), .leaves = signal_ == SIGTERM};
  if (training_ && change.lost.empty()) change.newcomers = training_->newcomers();
  Session::set(nullptr);
  while (true) {
    try {
      membership_.regroup(change, Deadline::after(std::chrono::duration<double>(timeouts_.regroup)));
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
