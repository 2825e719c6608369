#include "lockstep/collective/make_group.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <sstream>

#include "base/log.h"
#include "base/process.h"
#include "base/text.h"
#include "cluster/bootstrap.h"
#include "collective/direct_group.h"
#include "collective/make.h"
#include "collective/wrappers/wrapper.h"
#include "lockstep/collective/group_wrappers.h"
#include "transport/network_channels.h"
#include "transport/socket.h"

namespace lockstep {

const char* name_of(Implementation implementation) {
  switch (implementation) {
    case Implementation::automatic: return "auto";
    case Implementation::direct: return "direct";
    case Implementation::ring: return "ring";
    case Implementation::halving_doubling: return "halving_doubling";
    case Implementation::tree: return "tree";
    case Implementation::pairwise: return "pairwise";
    case Implementation::reduction_to_one_device: return "reduction_to_one_device";
    case Implementation::nccl: return "nccl";
  }
  return "unknown";
}

Implementation implementation_named(const std::string& name) {
  std::string allowed;
  for (int i = 0; i <= static_cast<int>(Implementation::nccl); ++i) {
    const auto implementation = static_cast<Implementation>(i);
    if (name == name_of(implementation)) return implementation;
    allowed += text(i == 0 ? "" : ", ", name_of(implementation));
  }
  throw InvalidArgument(text("there is no implementation \"", name, "\"; there are ", allowed));
}

namespace {

// The options that must be equal on all ranks, one a line.
std::string describe(const GroupOptions& options) {
  return text("backend ", options.backend, "\nnetwork ", options.network, "\nimplementation ",
              name_of(options.implementation), "\ngpu_backend ", options.gpu_backend, "\nbytes_per_pack ",
              options.bytes_per_pack, "\nchecked_calls ", options.checked_calls);
}

void require_same(const std::string& first, int rank, const std::string& other) {
  if (first == other) return;
  const auto [wants, theirs] = first_difference(first, other);
  throw InvalidArgument(
      text("make_group: the ranks' options differ: rank 0 has ", wants, ", rank ", rank, " has ", theirs));
}

void require_good(const World& world, const Access& access, const GroupOptions& options) {
  if (world.size < 1 || world.rank < 0 || world.rank >= world.size) {
    throw InvalidArgument(text("World: rank ", world.rank, " of ", world.size, "; ranks are 0 to size - 1"));
  }
  if (!(options.timeout_seconds > 0)) {
    throw InvalidArgument(text("make_group: timeout_seconds is ", options.timeout_seconds, "; it must be above 0"));
  }
  if (!(options.lost_host_seconds >= 3 && options.lost_host_seconds <= kLongestLostHostSeconds)) {
    throw InvalidArgument(text("make_group: lost_host_seconds is ", options.lost_host_seconds,
                               "; it must be from 3 to ", kLongestLostHostSeconds));
  }
  if (options.network != "tcp" && options.network != "ucx") {
    throw InvalidArgument(text("make_group: there is no network \"", options.network, "\"; there are tcp and ucx"));
  }
  const auto backends = {"auto", "shm", "tcp", "ucx", "hierarchical", "mpi"};
  if (std::find(backends.begin(), backends.end(), options.backend) == backends.end()) {
    throw InvalidArgument(
        text("make_group: there is no backend \"", options.backend, "\"; there are ", join(backends)));
  }
  try {
    transport::listen_at_any_port(world.address, access);
  } catch (const ClusterError& error) {
    throw InvalidArgument(text("World: rank ", world.rank, "'s address: ", error.what()));
  }
}

// Says why this rank cannot use UCX, whose connections are not authenticated; empty where it can.
std::string why_not_over_ucx(const collective::Place& place) {
  if (!transport::why_no_ucx().empty() || place.access.trusted_network) return transport::why_no_ucx();
  if (transport::is_loopback(place.address)) {
    static std::atomic<bool> told{false};
    if (!told.exchange(true)) {
      log_warning(
          "UCX's links cannot be protected: another user of this host who finds their ports can read and write this "
          "process's memory; the network \"tcp\" is protected, and LOCKSTEP_TRUSTED_NETWORK=1 says that all are "
          "trusted");
    }
    return "";
  }
  return text("UCX's links cannot be protected, and ", place.address,
              " is not a loopback address; where everybody who reaches this network is trusted, set "
              "LOCKSTEP_TRUSTED_NETWORK=1");
}

// The first rank's reason why it cannot share memory with the others of its host; empty where all can. Collective.
std::string problem_with_sharing(cluster::Bootstrap& members, int ranks_of_host, Deadline deadline) {
  const auto mine = transport::problem_with_mapping(collective::DirectGroup::layout(ranks_of_host).total_bytes());
  const auto problems = members.all_gather(mine, deadline);
  const auto first = std::find_if(problems.begin(), problems.end(), [](const auto& one) { return !one.empty(); });
  return first == problems.end() ? "" : text("rank ", first - problems.begin(), ": ", *first);
}

std::shared_ptr<GroupBackend> make_backend(cluster::Bootstrap& members, collective::Place place,
                                           const GroupOptions& options, Deadline deadline) {
  // Every rank sends its host and its options, so that all choose the same backend, or all throw where options differ.
  const auto hosts = members.all_gather(place.host, deadline);
  place.cores = collective::cores_of_host(members, hosts, deadline);
  const auto wanted = members.all_gather(describe(options), deadline);
  for (int r = 1; r < members.size(); ++r) require_same(wanted[0], r, wanted[static_cast<std::size_t>(r)]);
  const bool one_host = std::all_of(hosts.begin(), hosts.end(), [&](const auto& host) { return host == hosts[0]; });
  const bool all_apart = std::set<std::string>(hosts.begin(), hosts.end()).size() == hosts.size();
  const auto on_my_host = static_cast<int>(std::count(hosts.begin(), hosts.end(), place.host));
  const auto problem = all_apart && !one_host ? "" : problem_with_sharing(members, on_my_host, deadline);
  const std::string backend = options.backend != "auto" ? options.backend
                              : !problem.empty()        ? options.network
                              : one_host                ? "shm"
                              : all_apart               ? options.network
                                                        : "hierarchical";
  if (!problem.empty() && options.backend == "auto" && members.rank() == 0) {
    log_warning(text("the ranks of a host cannot share memory (", problem, "): they use ", options.network));
  }
  if (backend == "shm" && !one_host) {
    throw InvalidArgument(text("make_group: the backend \"shm\" is for ranks of one host; these are on ", join(hosts)));
  }
  if (backend == "ucx" || (backend == "hierarchical" && options.network == "ucx")) {
    const auto reasons = members.all_gather(why_not_over_ucx(place), deadline);
    for (std::size_t r = 0; r < reasons.size(); ++r) {
      if (!reasons[r].empty()) throw InvalidArgument(text("make_group: rank ", r, ": ", reasons[r]));
    }
  }
  if (backend == "shm") return collective::make_shm_backend(members, place, options, deadline);
  const auto spin = collective::spin_at_sockets(on_my_host, place.cores);
  if (backend == "tcp" || backend == "ucx") {
    return collective::make_network_backend(backend, members, place, options, spin, deadline);
  }
  if (backend == "mpi") return collective::make_mpi_backend(members, place, options, spin, deadline);
  return collective::make_hierarchical_backend(members, place, hosts, options, deadline);
}

}  // namespace

Group make_group(const World& world, const Store& store, const GroupOptions& given) {
  auto options = given;
  if (given.implementation == Implementation::nccl) {
    options.gpu_backend = "nccl";
    options.implementation = Implementation::automatic;
  }
  require_good(world, store.access(), options);
  const auto deadline = Deadline::after(std::chrono::duration<double>(options.timeout_seconds));
  cluster::StoreBootstrap members(world, store, deadline);
  try {
    const Group in_host_memory(make_backend(members, {world.host, world.address, store.access()}, options, deadline),
                               options.bytes_per_pack);
    auto group = with_gpus(in_host_memory, options.gpu_backend);
    if (collective::timeline_is_wanted()) group = collective::with_published_timeline(group, store, deadline);
    return group.backend() == "shm" || options.checked_calls == 0 ? group : with_checks(group, options.checked_calls);
  } catch (const DeadlineExceeded&) {
    throw;  // the others have deadlines of their own, and name whom they miss
  } catch (const std::exception& error) {
    members.give_up(error.what());
    throw;
  }
}

}  // namespace lockstep

namespace lockstep::collective {

int cores_of_host(cluster::Bootstrap& members, const std::vector<std::string>& hosts, Deadline deadline) {
  const auto all = members.all_gather(text(quota_cpu_count(), " ", join(allowed_cpus(), " ")), deadline);
  std::set<int> cpus;
  int quota = 0;  // ranks of one host may be in control groups with different quotas: the largest counts
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (hosts[r] != hosts[static_cast<std::size_t>(members.rank())]) continue;
    std::istringstream words(all[r]);
    int theirs = 0;
    words >> theirs;
    quota = std::max(quota, theirs);
    for (int cpu = 0; words >> cpu;) cpus.insert(cpu);
  }
  return std::min(static_cast<int>(cpus.size()), quota);
}

// About 10 us of spinning where each rank has a core, then 100 us of yielding: the awaited rank may need this core.
transport::SpinThenBlock spin_in_memory(int ranks, int cores) {
  constexpr int kSpins = 400, kYields = 200;
  return {.spins = ranks <= cores ? kSpins : 0, .yields = kYields};
}

// About 100 us. With more ranks than cores a rank blocks at once, so that its core is free for one with data to send.
transport::SpinThenBlock spin_at_sockets(int ranks, int cores) {
  constexpr int kSpins = 30;
  return {.spins = ranks <= cores ? kSpins : 0};
}

}  // namespace lockstep::collective
