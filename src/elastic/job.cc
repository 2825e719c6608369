#include "lockstep/elastic/job.h"

#include <atomic>
#include <optional>

#include "base/mutex.h"
#include "base/text.h"
#include "cluster/cpu_partition.h"
#include "cluster/rendezvous.h"
#include "collective/wrappers/wrapper.h"
#include "elastic/newcomers.h"
#include "elastic/next_generation.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// Prefixes of keys. Process groups and replica groups number their ranks differently, so each has its own.
constexpr const char* kProcesses = "processes/";
constexpr const char* kReplicas = "replicas/";
constexpr const char* kUsers = "user/";
constexpr const char* kOfMembers = "members/";
constexpr std::chrono::seconds kToReport(1), kToFindStore(10);
constexpr double kLongestPauseSeconds = 0.2;

std::string prefix_of(std::int64_t job) { return text("job ", job, "/"); }

Deadline start_deadline(double timeout_seconds) {
  if (timeout_seconds > 0) return Deadline::after(std::chrono::duration<double>(timeout_seconds));
  throw InvalidArgument(text("Job: timeout_seconds is ", timeout_seconds, "; it must be above 0"));
}

}  // namespace

struct Job::State {
  // Makes a process that is alone.
  explicit State(elastic::Members of) : members(std::move(of)), own_cores(false), is_newcomer(false) {}
  // Makes a process of a job's first generation, or one that comes later. `found`: the store at which its processes
  // meet; `here`: the store of its host.
  State(elastic::Members of, const Store& found, const Store& here, std::int64_t number, bool has_own_cores,
        bool has_come_later = false)
      : members(std::move(of)),
        prefix(prefix_of(number)),
        own_cores(has_own_cores),
        is_newcomer(has_come_later),
        stores(std::make_shared<cluster::ConnectedStores>(here.prefixed(prefix + kOfMembers))),
        store(found.prefixed(prefix)) {}
  // Makes a later generation of `before`.
  State(elastic::Members of, const State& before)
      : members(std::move(of)),
        prefix(before.prefix),
        own_cores(before.own_cores),
        is_newcomer(false),
        stores(before.stores) {}

  // Returns the store with this Job's prefix. A process that is alone makes one on first use. Processes of a later
  // generation meet at the store of rank 0's host.
  Store keys() {
    MutexLock lock(mutex);
    if (store) return *store;
    if (!stores) return store.emplace(Store::hold("127.0.0.1:0"));
    const auto& first = members.processes[0];
    const auto deadline = Deadline::after(kToFindStore);
    cluster::Liveness liveness(stores);
    while (true) {
      try {
        return store.emplace(stores->at(first.store).without_prefix().prefixed(prefix));
      } catch (const Error& error) {
        if (members.world.rank == 0) throw;
        if (cluster::Liveness::is_loss(liveness.look(first.store, first.name)) || deadline.passed()) {
          throw PeerLost(0, members.world.generation, text("its host's store does not answer (", error.what(), ")"));
        }
      }
      stores->pause(kLongestPauseSeconds);
    }
  }

  const elastic::Members members;
  const std::string prefix;  // of this Job's keys
  const bool own_cores, is_newcomer;
  const std::shared_ptr<cluster::ConnectedStores> stores;  // null where this process is alone
  Mutex mutex;
  std::optional<Store> store LOCKSTEP_GUARDED_BY(mutex);
};

namespace {

// Returns the members: all processes tell each other where they are. Hosts without a store of their own have `store`,
// which each process may know by another address.
elastic::Members gather_members(const World& world, const Store& store, const std::string& host_store,
                                Deadline deadline) {
  const auto place = store.prefixed("places/");
  place.set(text("rank ", world.rank), text(host_store, " ", world.host), deadline);
  std::vector<std::string> keys, hosts, stores;
  for (int r = 0; r < world.size; ++r) keys.push_back(text("rank ", r));
  for (const auto& printed : place.get(keys, deadline)) {
    const auto space = printed.find(' ');
    stores.push_back(space > 0 ? printed.substr(0, space) : store.address());
    hosts.push_back(printed.substr(space + 1));
  }
  return elastic::first_members(world, hosts, stores);
}

}  // namespace

Job Job::from_environment(double timeout_seconds) { return Job(resolve_cluster(), timeout_seconds); }

Job::Job(const Cluster& cluster, double timeout_seconds) {
  const auto deadline = start_deadline(timeout_seconds);
  if (cluster.world.size == 1 && cluster.store.empty() && cluster.source.empty()) {
    state_ = std::make_shared<State>(elastic::first_members(cluster.world));
    return;
  }
  if (cluster.joins) {
    throw ClusterError(
        "this process was started to join a job that runs (LOCKSTEP_JOIN), and only programs with an elastic strategy "
        "can: leave out --restarts, or --min-n");
  }
  const auto found = cluster::rendezvous(cluster, deadline);
  const auto number = found.store.add(text("jobs of rank ", found.world.rank), 1, deadline);
  const bool has_own = !cluster.host_store.empty() && cluster.host_store != found.store.address();
  const auto here = has_own ? Store::connect(cluster.host_store, deadline, found.store.access()) : found.store;
  auto members = gather_members(found.world, found.store.prefixed(prefix_of(number)), cluster.host_store, deadline);
  if (!cluster.host_store.empty()) elastic::add_store(members.stores, found.store.address());
  state_ = std::make_shared<State>(std::move(members), found.store, here, number, found.own_cores);
  if (cluster.host_store.empty()) return;  // its launcher ends all processes when one is lost
  here.set(cluster::kJobHasBegun, "yes", deadline);
  elastic::publish(state_->members, *state_->stores);
}

// A newcomer numbers its Jobs as the processes of the job number theirs.
Job Job::newcomer(const Cluster& cluster, double timeout_seconds) {
  static std::atomic<std::int64_t> made = 0;
  const auto found = cluster::find_store(cluster, start_deadline(timeout_seconds));
  cluster::keep_to_partition({found.world.local_rank, found.world.local_size, false});
  auto alone = found.world;
  alone.rank = alone.local_rank = 0;
  alone.size = alone.local_size = 1;
  auto members = elastic::first_members(alone, found.store.address());
  return Job(std::make_shared<State>(std::move(members), found.store, found.store, ++made, false, true));
}

bool Job::is_newcomer() const { return state_->is_newcomer; }

Job Job::joined(const elastic::Members& members) const {
  elastic::publish(members, *state_->stores);
  return Job(std::make_shared<State>(members, *state_));
}

const World& Job::world() const { return state_->members.world; }
const elastic::Members& Job::members() const { return state_->members; }
std::shared_ptr<cluster::ConnectedStores> Job::stores() const { return state_->stores; }
std::shared_ptr<elastic::Registry> Job::registry() const {
  return std::make_shared<elastic::Registry>(state_->stores, members());
}
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
  if (!state_->stores) {  // this process is alone
    const auto stores = std::make_shared<cluster::ConnectedStores>(state_->keys().prefixed(kOfMembers));
    const auto alone = elastic::first_members(world(), stores->here().address());
    elastic::Registry registry(stores, alone);
    return Job(std::make_shared<State>(elastic::next_generation(alone, registry, change, deadline), *state_));
  }
  auto next = elastic::next_generation(members(), *registry(), change, deadline);
  if (change.leaves) return Job(std::make_shared<State>(std::move(next), *state_));  // this one is no member then
  return joined(next);
}

}  // namespace lockstep
