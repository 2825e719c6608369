#include "lockstep/collective/job.h"

#include <optional>

#include "base/mutex.h"
#include "base/text.h"
#include "cluster/next_generation.h"
#include "cluster/rendezvous.h"
#include "collective/wrappers/published_timeline.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// Prefixes of keys. Process groups and replica groups number their ranks differently, so each has its own.
constexpr const char* kProcesses = "processes/";
constexpr const char* kReplicas = "replicas/";
constexpr const char* kUsers = "user/";
constexpr std::chrono::seconds kToReport(1);

Deadline start_deadline(double timeout_seconds) {
  if (timeout_seconds > 0) return Deadline::after(std::chrono::duration<double>(timeout_seconds));
  throw InvalidArgument(text("Job: timeout_seconds is ", timeout_seconds, "; it must be above 0"));
}

}  // namespace

struct Job::State {
  State(World of, std::optional<Store> found, bool has_own_cores)
      : world(std::move(of)), own_cores(has_own_cores), store(std::move(found)) {}

  // The store with this Job's prefix. A process that is alone makes one on first use.
  Store keys() {
    MutexLock lock(mutex);
    if (!store) store = Store::hold("127.0.0.1:0");
    return *store;
  }

  const World world;
  const bool own_cores;
  Mutex mutex;
  std::optional<Store> store LOCKSTEP_GUARDED_BY(mutex);
};

Job Job::from_environment(double timeout_seconds) { return Job(resolve_cluster(), timeout_seconds); }

Job::Job(const Cluster& cluster, double timeout_seconds) {
  const auto deadline = start_deadline(timeout_seconds);
  if (cluster.world.size == 1 && cluster.store.empty() && cluster.source.empty()) {
    state_ = std::make_shared<State>(cluster.world, std::nullopt, false);
    return;
  }
  const auto found = cluster::rendezvous(cluster, deadline);
  const auto number = found.store.add(text("jobs of rank ", found.world.rank), 1, deadline);
  state_ = std::make_shared<State>(found.world, found.store.prefixed(text("job ", number, "/")), found.own_cores);
}

const World& Job::world() const { return state_->world; }
bool Job::has_own_cores() const { return state_->own_cores; }
Store Job::store() const { return state_->keys().prefixed(kUsers); }

Group Job::group(const GroupOptions& options) const {
  if (size() == 1 && !collective::timeline_is_wanted()) return make_thread_groups(1)[0];
  return make_group(world(), state_->keys().prefixed(kProcesses), options);
}

Group Job::replica_group(int replicas, int replica, const GroupOptions& options) const {
  auto of_replica = world();
  of_replica.rank = rank() * replicas + replica;
  of_replica.size = size() * replicas;
  return make_group(of_replica, state_->keys().prefixed(kReplicas), options);
}

void Job::fail_waiters(const std::string& reason) const {
  try {
    const auto keys = state_->keys();
    for (const auto* groups : {kProcesses, kReplicas}) {
      keys.fail_waiters(text(groups, "generation ", world().generation, "/"), reason, Deadline::after(kToReport));
    }
  } catch (const Error&) {
    // The store is gone: nobody waits there.
  }
}

Job Job::regroup(const std::vector<int>& lost, Deadline deadline) const {
  const auto keys = state_->keys();
  return Job(std::make_shared<State>(cluster::next_generation(world(), keys, lost, deadline), keys, has_own_cores()));
}

}  // namespace lockstep
