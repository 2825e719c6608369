// The store of a job, held or found.
#include <cstdlib>
#include <map>
#include <thread>

#include "base/hash.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "cluster/bootstrap.h"
#include "cluster/cpu_partition.h"
#include "cluster/rendezvous.h"
#include "cluster/resolvers.h"
#include "cluster/store_backend.h"
#include "cluster/store_server.h"
#include "lockstep/base/error.h"
#include "transport/handshake.h"
#include "transport/socket.h"

namespace lockstep::cluster {

std::string key_of_refusal(const std::string& rank, const std::string& restart) {
  return text("refusal of rank ", rank, ", restart ", restart);
}

namespace {

// Where nobody names a port, all ranks try these in one order; the system gives out higher ones. The second half
// follows from the token too: another user of the host cannot know and take those ports before rank 0.
constexpr int kCandidates = 16, kPublicCandidates = kCandidates / 2;
constexpr int kFirstPort = 10'000, kPorts = 20'000;
constexpr std::chrono::milliseconds kBetweenRounds(50);
constexpr std::chrono::seconds kToProve(2), kForAnswer(2);
constexpr const char* kJob = "job";
constexpr const char* kStore = "the store's address";

int candidate_port(const Cluster& cluster, const Access& access, int index) {
  const auto of_job = hash_of(cluster.job);
  const auto secret = index < kPublicCandidates ? of_job : transport::secret_number(access, cluster.job);
  return kFirstPort + static_cast<int>(mix(secret, static_cast<std::uint64_t>(index)) % kPorts);
}

std::vector<std::string> candidates(const Cluster& cluster, const Access& access) {
  std::vector<std::string> addresses;
  for (int i = 0; i < kCandidates; ++i) {
    addresses.push_back(transport::with_port(cluster.store, candidate_port(cluster, access, i)));
  }
  return addresses;
}

Store hold_somewhere(const Cluster& cluster, Deadline deadline) {
  const auto access = access_of_environment();
  std::string problem;
  for (int i = 0; i < kCandidates; ++i) {
    try {
      const auto store = hold_at(cluster.store, candidate_port(cluster, access, i), access);
      store.set(kJob, cluster.job, deadline);
      return store;
    } catch (const ClusterError& error) {
      problem = error.what();  // usually the port is in use
    }
  }
  throw ClusterError(text("rank 0 can hold no store: ", problem));
}

// The store of the job among `addresses`. Another job's store, or another program, may answer at any of them.
std::optional<Store> find_among(std::vector<std::string> addresses, const std::string& job, const Access& access,
                                std::string& problem) {
  while (const auto found =
             transport::first_that_proves(addresses, access, store_greeting(), Deadline::after(kToProve), problem)) {
    const auto at = addresses[*found];
    try {
      const auto store = Store::connect(at, Deadline::after(kForAnswer), access);
      if (store.get(kJob, Deadline::after(kForAnswer)) == job) return store;
      problem = text("another job's answers at ", at);
    } catch (const ClusterError& error) {
      problem = error.what();
    } catch (const DeadlineExceeded& error) {
      problem = error.what();
    }
    addresses.erase(addresses.begin() + static_cast<std::ptrdiff_t>(*found));
  }
  return std::nullopt;
}

Store find(const Cluster& cluster, Deadline deadline) {
  const auto access = access_of_environment();
  const auto addresses = candidates(cluster, access);
  std::string problem = "nobody answers there";
  while (true) {
    if (auto store = find_among(addresses, cluster.job, access, problem)) return *store;
    if (deadline.passed()) {
      throw DeadlineExceeded("finding rank 0", deadline.waited(), {0},
                             text(" (the store of job \"", cluster.job, "\" is not at ", addresses[0], " or the ",
                                  kCandidates - 1, " places after it: ", problem, ")"));
    }
    std::this_thread::sleep_for(kBetweenRounds);
  }
}

// With MPICH rank 0 holds the store on a port that the system chooses, and sends its address through the process
// manager.
bool through_pmi(const Cluster& cluster) { return cluster.source == "MPICH" && cluster.world.size > 1; }

Store hold(const Cluster& cluster, Deadline deadline) {
  if (!cluster.job.empty()) return hold_somewhere(cluster, deadline);
  if (cluster.store.empty()) return Store::hold("127.0.0.1:0");  // of a process that is alone
  if (through_pmi(cluster)) return Store::hold(cluster.store);   // a numeric address, any port
  return hold_at(host_of(cluster.store, kStore), port_of(cluster.store, kStore));
}

Store connect(const Cluster& cluster, Deadline deadline) {
  return cluster.job.empty() ? Store::connect(cluster.store, deadline) : find(cluster, deadline);
}

// The store that this process holds until it ends, so that its next Job finds the store again.
Store held(const Cluster& cluster, Deadline deadline) {
  static Mutex mutex;
  static std::map<std::string, Store> stores;  // guarded by mutex
  MutexLock lock(mutex);
  const auto name = text(cluster.store, " ", cluster.job);
  const auto found = stores.find(name);
  return found != stores.end() ? found->second : stores.emplace(name, hold(cluster, deadline)).first->second;
}

// Debian's /etc/hosts maps a machine's own name to a loopback address.
void require_reachable(const World& world, const std::string& named) {
  if (world.local_size == world.size || named.empty() || transport::is_loopback(named) ||
      !transport::is_loopback(world.address))
    return;
  throw ClusterError(
      text("the ranks are on several hosts, but on this one ", named, " is ", world.address,
           ", which the others cannot reach; name rank 0's host by another address, or mend /etc/hosts"));
}

// Ranks that share one host use the loopback address; a process that is alone needs no known port.
Cluster on_loopback(Cluster cluster) {
  if (cluster.world.size == 1 && cluster.holds_store) {
    cluster.store.clear();
    cluster.job.clear();
    return cluster;
  }
  const bool of_a_rank = cluster.source != "lockstep run";  // lockstep run may hold it on another host
  const bool named = !cluster.store.empty() && !through_pmi(cluster);
  if (!of_a_rank || !named || cluster.world.local_size != cluster.world.size) return cluster;
  cluster.store = cluster.job.empty() ? transport::with_port("127.0.0.1", port_of(cluster.store, kStore)) : "127.0.0.1";
  return cluster;
}

// Registers this rank, so that two processes of one rank, and ranks that disagree about their number, fail at once.
// Then limits this process to its share of its host's cores.
void take_place(Rendezvous& found, Deadline deadline) {
  StoreBootstrap members(found.world, found.store, deadline);
  try {
    found.own_cores = has_own_cores(found.world, members, deadline);
  } catch (const DeadlineExceeded& error) {
    throw DeadlineExceeded("finding the other ranks", error.waited_for(), error.ranks());
  }
  if (found.world.local_size > 1) {
    keep_to_partition({found.world.local_rank, found.world.local_size, found.own_cores});
  }
}

}  // namespace

Store hold_at(const std::string& host, int port, const Access& access) {
  if (transport::is_loopback(host)) return Store::hold(transport::with_port(host, port), access);
  const auto everywhere = transport::with_port(transport::has_ipv6() ? "::" : "0.0.0.0", port);
  try {
    return Store::hold(everywhere, access);
  } catch (const ClusterError& error) {  // rethrown with the address as the launcher names it
    std::string what = error.what();
    const auto at = what.find(everywhere);
    if (at != std::string::npos) what.replace(at, everywhere.size(), transport::with_port(host, port));
    throw ClusterError(what);
  }
}

Rendezvous find_store(const Cluster& resolved, Deadline deadline) {
  const auto cluster = on_loopback(resolved);
  if (cluster.source == "Open MPI" || cluster.source == "MPICH") end_with_launcher();
  const bool holds = cluster.holds_store || (cluster.world.size == 1 && cluster.store.empty());
  auto place = cluster;
  if (through_pmi(cluster)) {
    place.store = share_through_pmi(pmi_descriptor(&std::getenv), cluster.holds_store,
                                    cluster.holds_store ? held(cluster, deadline).address() : "", deadline);
  }
  Rendezvous found{cluster.world, holds ? held(cluster, deadline) : connect(place, deadline)};
  const bool has_port = cluster.job.empty() && !cluster.store.empty();
  const bool is_named = !through_pmi(cluster) && !is_etcd(cluster.store);
  const auto named = !is_named ? "" : has_port ? host_of(cluster.store, kStore) : cluster.store;
  found.world.address =
      named.empty() ? found.store.backend().local_address(deadline) : transport::address_towards(named, deadline);
  require_reachable(found.world, named);
  return found;
}

Rendezvous rendezvous(const Cluster& cluster, Deadline deadline) {
  const WaitingNotice notice(text("rank ", cluster.world.rank, " of ", cluster.world.size, " (by ", cluster.source,
                                  ") waits for the others to start, by the store at ", cluster.store),
                             deadline);
  auto found = find_store(cluster, deadline);
  take_place(found, deadline);
  if (found.world.rank == 0) found.store.set(kJobHasBegun, "yes", deadline);
  return found;
}

}  // namespace lockstep::cluster
