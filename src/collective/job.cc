#include "lockstep/collective/job.h"

#include <atomic>
#include <optional>

#include "base/mutex.h"
#include "base/text.h"
#include "cluster/cpu_partition.h"
#include "cluster/rendezvous.h"
#include "collective/wrappers/published_timeline.h"
#include "elastic/next_generation.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// Prefixes of keys. Process groups and replica groups number their ranks differently, so each has its own.
constexpr const char* kProcesses = "processes/";
constexpr const char* kReplicas = "replicas/";
constexpr const char* kUsers = "user/";
constexpr const char* kMembers = "members/";
constexpr std::chrono::seconds kToReport(1);

std::string prefix_of(std::int64_t job) { return text("job ", job, "/"); }

Deadline start_deadline(double timeout_seconds) {
  if (timeout_seconds > 0) return Deadline::after(std::chrono::duration<double>(timeout_seconds));
  throw InvalidArgument(text("Job: timeout_seconds is ", timeout_seconds, "; it must be above 0"));
}

}  // namespace

struct Job::State {
  State(elastic::Members of, std::optional<Store> found, bool has_own_cores, bool has_come_later = false)
      : members(std::move(of)), own_cores(has_own_cores), is_newcomer(has_come_later), store(std::move(found)) {}

  // The store with this Job's prefix. A process that is alone makes one on first use.
  Store keys() {
    MutexLock lock(mutex);
    if (!store) store = Store::hold("127.0.0.1:0");
    return *store;
  }

  const elastic::Members members;
  const bool own_cores, is_newcomer;
  Mutex mutex;
  std::optional<Store> store LOCKSTEP_GUARDED_BY(mutex);
};

Job Job::from_environment(double timeout_seconds) { return Job(resolve_cluster(), timeout_seconds); }

Job::Job(const Cluster& cluster, double timeout_seconds) {
  const auto deadline = start_deadline(timeout_seconds);
  if (cluster.world.size == 1 && cluster.store.empty() && cluster.source.empty()) {
    state_ = std::make_shared<State>(elastic::first_members(cluster.world), std::nullopt, false);
    return;
  }
  if (cluster.joins) {
    throw ClusterError(
        "this process was started to join a job that runs (LOCKSTEP_JOIN), and only programs with an elastic strategy "
        "can: leave out --restarts, or --min-n");
  }
  const auto found = cluster::rendezvous(cluster, deadline);
  const auto number = found.store.add(text("jobs of rank ", found.world.rank), 1, deadline);
  state_ = std::make_shared<State>(elastic::first_members(found.world), found.store.prefixed(prefix_of(number)),
                                   found.own_cores);
}

// It numbers its Jobs as the processes of the job number theirs.
Job Job::newcomer(const Cluster& cluster, double timeout_seconds) {
  static std::atomic<std::int64_t> made = 0;
  const auto found = cluster::find_store(cluster, start_deadline(timeout_seconds));
  cluster::keep_to_partition({found.world.local_rank, found.world.local_size, false});
  auto alone = found.world;
  alone.rank = alone.local_rank = 0;
  alone.size = alone.local_size = 1;
  return Job(
      std::make_shared<State>(elastic::first_members(alone), found.store.prefixed(prefix_of(++made)), false, true));
}

bool Job::is_newcomer() const { return state_->is_newcomer; }
Store Job::membership() const { return state_->keys().prefixed(kMembers); }

Job Job::joined(const elastic::Members& members) const {
  return Job(std::make_shared<State>(members, state_->keys(), has_own_cores()));
}

const World& Job::world() const { return state_->members.world; }
const elastic::Members& Job::members() const { return state_->members; }
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
  return regroup(elastic::Change{.lost = lost}, deadline);
}

Job Job::regroup(const elastic::Change& change, Deadline deadline) const {
  elastic::StoreRegistry registry(membership());
  return joined(elastic::next_generation(members(), registry, change, deadline));
}

}  // namespace lockstep
