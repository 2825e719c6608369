#include "lockstep/job.h"

#include "base/text.h"
#include "cluster/next_generation.h"
#include "cluster/rendezvous.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Groups have keys of their own: their ranks are others.
constexpr const char* kProcesses = "processes/";
constexpr const char* kReplicas = "replicas/";
constexpr std::chrono::seconds kToAbandon(1);

Deadline start_deadline(double timeout_seconds) {
  if (timeout_seconds > 0) return Deadline::after(std::chrono::duration<double>(timeout_seconds));
  throw InvalidArgument(text("Job: timeout_seconds is ", timeout_seconds, "; it must be above 0"));
}

}  // namespace

struct Job::State {
  World world;
  Store store;  // with this Job's prefix
  bool own_cores = false;
};

Job Job::from_environment(double timeout_seconds) { return Job(resolve_cluster(), timeout_seconds); }

Job::Job(const Cluster& cluster, double timeout_seconds) {
  const auto deadline = start_deadline(timeout_seconds);
  const auto found = rendezvous(cluster, deadline);
  const auto number = found.store.add(text("jobs of rank ", found.world.rank), 1, deadline);
  state_ =
      std::make_shared<State>(State{found.world, found.store.prefixed(text("job ", number, "/")), found.own_cores});
}

const World& Job::world() const { return state_->world; }
bool Job::has_own_cores() const { return state_->own_cores; }
const Store& Job::store() const { return state_->store; }

Group Job::group(const GroupOptions& options) const {
  return make_group(world(), store().prefixed(kProcesses), options);
}

Group Job::replica_group(int replicas, int replica, const GroupOptions& options) const {
  auto of_replica = world();
  of_replica.rank = rank() * replicas + replica;
  of_replica.size = size() * replicas;
  return make_group(of_replica, store().prefixed(kReplicas), options);
}

void Job::abandon(const std::string& reason) const {
  try {
    for (const auto* groups : {kProcesses, kReplicas}) {
      store().abandon(text(groups, "generation ", world().generation, "/"), reason, Deadline::after(kToAbandon));
    }
  } catch (const Error&) {
    // The store is gone: nobody waits there.
  }
}

Job Job::regroup(const std::vector<int>& lost, Deadline deadline) const {
  return Job(
      std::make_shared<State>(State{next_generation(world(), store(), lost, deadline), store(), has_own_cores()}));
}

}  // namespace lockstep
