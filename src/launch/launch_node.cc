// The launcher of one of several hosts on which the user, or a scheduler, starts one each.
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/text.h"
#include "cluster/rendezvous.h"
#include "cluster/resolvers.h"
#include "cluster/store_backend.h"
#include "launch/host_part.h"
#include "launch/job_store.h"
#include "launch/launcher.h"
#include "launch/nodes.h"
#include "launch/reaper.h"
#include "launch/signals.h"
#include "launch/token_file.h"
#include "lockstep/base/error.h"
#include "transport/all_gather.h"
#include "transport/socket.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::minutes kForStoreToCome(10);
constexpr std::chrono::seconds kToReachStore(5), kForLocalAddress(10), kLongestSilence(30);
constexpr std::chrono::milliseconds kForAnswer(500), kBetweenPolls(500);
constexpr const char* kRanksHaveEnded = "the ranks of this host have ended";

// Whether the name, or address, is one of this machine's.
bool is_own(const std::string& host, const std::string& token) {
  try {
    transport::listen_at(transport::with_port(host, 0), {.token = token});  // closed at once
    return true;
  } catch (const Error&) {
    return false;
  }
}

// The launcher on the host that the address names holds it, if nobody does. Nothing where stop() says so.
struct JobStore {
  Store store;
  std::optional<Store> held;  // the same, by the address at which it listens
};
std::optional<JobStore> find_or_hold(const std::string& address, const Access& access,
                                     const std::function<bool()>& stop, std::ostream& err) {
  const auto answers = [&] { return transport::answers_at(address, Deadline::after(kForAnswer)); };
  std::optional<Store> held;
  if (!cluster::is_etcd(address) && !answers() && is_own(cluster::host_of(address, "--store"), access.token)) {
    try {
      held = cluster::hold_at(cluster::host_of(address, "--store"), cluster::port_of(address, "--store"), access);
      err << "lockstep: this node holds the store at " << address << ": a new job begins here" << std::endl;
    } catch (const ClusterError&) {
      if (!answers()) throw;  // else another launcher of this host was first
    }
  }
  const auto deadline = Deadline::after(kForStoreToCome);
  for (bool told = false; !stop();) {
    try {
      return JobStore{Store::connect(address, Deadline::after(kToReachStore), access), held};
    } catch (const DeadlineExceeded& late) {
      if (deadline.passed()) throw;
      if (!std::exchange(told, true)) err << "lockstep: waiting for the store: " << late.what() << std::endl;
    }
  }
  return std::nullopt;
}

// Nodes may name the members of an etcd cluster in any order; processes know a store by one address.
Store by_its_first_address(const Store& store) {
  const auto first = store.compare_set("address of the store", "", store.address(), Deadline::after(kToReachStore));
  return first == store.address() ? store : Store::connect(first, Deadline::after(kToReachStore), store.access());
}

// Until the job has begun: where a node with which it was to begin has ended, the others do not wait for its ranks.
void watch_beginning(const std::stop_token& stop, const Node& node, const Store& job) {
  for (; !stop.stop_requested(); std::this_thread::sleep_for(kBetweenPolls)) {
    const auto missing = node.ranks_that_will_not_come();
    if (!missing) return;
    for (const int rank : *missing) tell_that_it_ended([&] { return job; }, rank);
  }
}

// Keeps this host's store while other members may need it to agree on who goes on. One that does not answer is lost
// when the training has ended, or when it has been silent for some time.
void hold_for_others(const Store& store, const Signals& signals) {
  store.set(kRanksHaveEnded, "yes", Deadline::after(kForStore));
  std::map<std::string, Deadline> lost_at;
  const auto needs_this = [&](const std::string& address) {
    const auto give_up = lost_at.try_emplace(address, Deadline::after(kLongestSilence)).first;
    try {
      if (transport::answers_at(address, Deadline::after(kForAnswer))) {
        const auto other = Store::connect(address, Deadline::after(kForStore), store.access());
        const bool runs = other.compare_set(kRanksHaveEnded, "", "", Deadline::after(kForStore)).empty();
        give_up->second = Deadline::after(kLongestSilence);
        return runs;
      }
    } catch (const Error&) {  // it does not answer
    }
    return entry(store, cluster::kMembersAtEnd).empty() && !give_up->second.passed();
  };
  for (bool is_needed = true; is_needed && signals.next() == 0; std::this_thread::sleep_for(kBetweenPolls)) {
    std::set<std::string> others;
    bool is_member = false;
    for (const auto& place : places_of_members(store)) {
      is_member |= place.store == store.address();
      if (place.store != store.address()) others.insert(place.store);
    }
    is_needed = is_member && std::any_of(others.begin(), others.end(), needs_this);
  }
}

}  // namespace

int launch_node(const LaunchOptions& options, std::ostream& out, std::ostream& err) {
  make_folder(options.log_dir);
  const Reaper reaper;
  const Signals signals;
  auto access = access_of_environment();
  access.trusted_network |= options.trusted_network;
  if (access.token.empty()) {
    throw ClusterError(
        text("lockstep run: --nnodes needs a token that all nodes have: set LOCKSTEP_TOKEN_FILE to a file with 64 "
             "hexadecimal digits, which `openssl rand -hex 32` prints"));
  }
  const TokenFile token(transport::hexadecimal(access.token));
  int asked = 0;
  const auto stop = [&] { return (asked = signals.next()) != 0; };
  const auto found = find_or_hold(options.store, access, stop, err);
  if (!found) return JobProcesses::report_signal(asked, err);
  const bool in_etcd = cluster::is_etcd(options.store);
  const auto job = in_etcd ? by_its_first_address(found->store) : found->store;
  auto here = job;
  if (!in_etcd && !found->held) {
    const auto address = job.backend().local_address(Deadline::after(kForLocalAddress));
    here = Store::hold(transport::with_port(address, 0), access);
    close_nodes(here, Deadline::after(kForStore));  // who comes to this store joins the job
  }
  Node node(job, options.processes.value_or(1));
  const auto place = node.wait(*options.nodes, stop, err);
  if (!place) return JobProcesses::report_signal(asked, err);
  err << "lockstep: this is node " << place->host << (place->joins ? ", which joins the job" : "");
  if (!in_etcd) err << "; others may join the job with --store " << here.address();
  err << std::endl;
  HostPart part{.size = place->size,
                .first = place->first,
                .count = options.processes.value_or(1),
                .host = place->host,
                .store = job.address(),
                .host_store = here.address(),
                .command = options.command,
                .log_dir = options.log_dir,
                .trusted_network = access.trusted_network,
                .on_terminal = isatty(STDOUT_FILENO) == 1,
                .elastic = true};
  if (place->joins) {
    part.known_stores.push_back(job.address());
    here.compare_set(cluster::kKnownStores, "", job.address(), Deadline::after(kForStore));
    here.set(cluster::kJobHasBegun, "yes", Deadline::after(kForStore));
  }
  JobProcesses::Context context{signals, reaper, out, err};
  context.ended = [&](int rank) { tell_that_it_ended([&] { return job; }, rank); };
  use_store(context, here);
  const JobProcesses::Limits limits{.grace_seconds = options.grace_seconds,
                                    .restarts = options.restarts,
                                    .elastic = true,
                                    .others_run_elsewhere = true};
  std::jthread beginning;
  if (!place->joins) beginning = std::jthread([&](const std::stop_token& ends) { watch_beginning(ends, node, job); });
  JobProcesses ranks(ranks_of(part, token.path()), limits, context);
  const int status = ranks.run();
  beginning = {};  // it has ended, or never began
  if (ranks.nobody_is_left()) {
    err << "lockstep run: no worker is left that could take in others: start the job again on all nodes; it goes on "
           "from its last backup if it has one"
        << std::endl;
  }
  if (!in_etcd) hold_for_others(here, signals);
  return status;
}

}  // namespace lockstep::launch
