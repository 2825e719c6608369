// The store of a job, held or found.
#include <map>
#include <thread>

#include "base/hash.h"
#include "base/mutex.h"
#include "base/text.h"
#include "cluster/pmi.h"
#include "cluster/resolvers.h"
#include "lockstep/cluster.h"
#include "lockstep/error.h"
#include "transport/socket.h"

namespace lockstep {
namespace {

// Where nobody names a port, all ranks try the same ones, in the same order, below those that the system gives out.
constexpr int kCandidates = 16;
constexpr int kFirstPort = 10'000, kPorts = 20'000;
constexpr std::chrono::milliseconds kBetweenRounds(50);
constexpr std::chrono::seconds kForConnecting(1), kForAnswer(2);
constexpr const char* kJob = "job";

std::string candidate(const Cluster& cluster, int index) {
  std::uint64_t hash = static_cast<std::uint64_t>(index);
  for (const char c : cluster.job) hash = mix(hash, static_cast<unsigned char>(c));
  return with_port(cluster.store, kFirstPort + static_cast<int>(hash % kPorts));
}

Store hold_somewhere(const Cluster& cluster, Deadline deadline) {
  std::string problem;
  for (int i = 0; i < kCandidates; ++i) {
    try {
      const auto store = Store::hold(candidate(cluster, i));
      store.set(kJob, cluster.job, deadline);
      return store;
    } catch (const ClusterError& error) {
      problem = error.what();  // in use, mostly
    }
  }
  throw ClusterError(text("rank 0 can hold no store: ", problem));
}

// Another job's store, or another program, may be at one of the places.
Store find(const Cluster& cluster, Deadline deadline) {
  std::string problem = "nobody answers there";
  while (true) {
    for (int i = 0; i < kCandidates; ++i) {
      try {
        if (!answers_at(candidate(cluster, i), Deadline::after(kForConnecting))) continue;
        const auto store = Store::connect(candidate(cluster, i), Deadline::after(kForAnswer));
        if (store.get(kJob, Deadline::after(kForAnswer)) == cluster.job) return store;
        problem = "another job's answers there";
      } catch (const ClusterError& error) {
        problem = error.what();
      } catch (const DeadlineExceeded& error) {
        problem = error.what();
      }
    }
    if (deadline.passed()) {
      throw DeadlineExceeded("finding rank 0", deadline.waited(), {0},
                             text(" (the store of job \"", cluster.job, "\" is not at ", candidate(cluster, 0),
                                  " or the ", kCandidates - 1, " places after it: ", problem, ")"));
    }
    std::this_thread::sleep_for(kBetweenRounds);
  }
}

Store hold(const Cluster& cluster, Deadline deadline) {
  return cluster.job.empty() ? Store::hold(cluster.store) : hold_somewhere(cluster, deadline);
}

Store connect(const Cluster& cluster, Deadline deadline) {
  return cluster.job.empty() ? Store::connect(cluster.store, deadline) : find(cluster, deadline);
}

// Of this process, until it ends: the next strategy meets at the same place.
Store held(const Cluster& cluster, Deadline deadline) {
  static Mutex mutex;
  static std::map<std::string, Store> stores;  // guarded by mutex
  MutexLock lock(mutex);
  const auto name = text(cluster.store, " ", cluster.job);
  const auto found = stores.find(name);
  return found != stores.end() ? found->second : stores.emplace(name, hold(cluster, deadline)).first->second;
}

// Debian gives a machine's own name an address that leads nowhere else.
void require_reachable(const World& world, const std::string& named) {
  if (world.local_size == world.size || named.empty() || is_loopback(named) || !is_loopback(world.address)) return;
  throw ClusterError(
      text("the ranks are on several hosts, but on this one ", named, " is ", world.address,
           ", which the others cannot reach; name rank 0's host by another address, or mend /etc/hosts"));
}

}  // namespace

Meeting meet(const Cluster& cluster, Deadline deadline) {
  auto place = cluster;
  if (cluster.pmi_fd >= 0) {
    // Rank 0 holds the store wherever the system gives it a port, and tells the others through the process manager.
    place.store = share_through_pmi(cluster.pmi_fd, cluster.holds_store,
                                    cluster.holds_store ? held(cluster, deadline).address() : "", deadline);
  }
  Meeting meeting{cluster.world, cluster.holds_store ? held(cluster, deadline) : connect(place, deadline)};
  meeting.world.address = address_towards(host_of(meeting.store.address(), "the store's address"));
  const bool has_port = cluster.job.empty() && !cluster.store.empty();
  require_reachable(meeting.world, has_port ? host_of(cluster.store, "the store's address") : cluster.store);
  return meeting;
}

Store place_of_next(const Meeting& meeting, const std::string& kind, Deadline deadline) {
  const auto number = meeting.store.add(text(kind, " of rank ", meeting.world.rank), 1, deadline);
  return meeting.store.prefixed(text(kind, " ", number, "/"));
}

}  // namespace lockstep
