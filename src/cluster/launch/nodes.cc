#include "cluster/launch/nodes.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <ostream>
#include <set>
#include <sstream>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/process.h"
#include "base/text.h"
#include "cluster/launch/host_part.h"
#include "cluster/launch/hosts.h"
#include "cluster/launch/launcher.h"
#include "cluster/launch/launcher_process.h"
#include "cluster/launch/supervisor.h"
#include "cluster/liveness.h"
#include "cluster/rendezvous.h"
#include "cluster/resolvers.h"
#include "cluster/store_backend.h"
#include "lockstep/base/error.h"
#include "transport/connections.h"
#include "transport/socket.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::minutes kForStoreToCome(10);
constexpr std::chrono::seconds kToReachStore(5), kForLocalAddress(10);
constexpr double kLongestSilenceSeconds = 30;
constexpr std::chrono::milliseconds kForAnswer(500), kBetweenPolls(500);
constexpr const char* kRanksHere = "the ranks of this host";  // that name their end in the host's store
constexpr std::chrono::minutes kForNodes(10);
constexpr std::chrono::milliseconds kBetweenNodesLooks(100);
constexpr const char *kNodes = "nodes", *kRanksThatCame = "ranks of nodes that came later",
                     *kNodesThatJoin = "nodes that join";

std::string name_of_node(const std::string& host) { return "node " + host; }

Deadline soon() { return Deadline::after(std::chrono::seconds(10)); }

}  // namespace

// The nodes with which the job begins. As text: 1 where no other may come; then a host and its number of ranks a line.
struct Node::Entry {
  bool is_closed = false;
  std::vector<HostSlots> nodes;

  static Entry parse(const std::string& printed) {
    Entry entry;
    std::istringstream in(printed);
    in >> entry.is_closed;
    for (HostSlots node; in >> node.name >> node.slots;) entry.nodes.push_back(node);
    return entry;
  }
  std::string print() const {
    auto printed = text(is_closed ? 1 : 0, "\n");
    for (const auto& [host, processes] : nodes) printed += text(host, " ", processes, "\n");
    return printed;
  }
  std::vector<HostSlots>::const_iterator find(const std::string& host) const {
    return std::find_if(nodes.begin(), nodes.end(), [&](const auto& node) { return node.name == host; });
  }
  int ranks_before(std::vector<HostSlots>::const_iterator end) const {
    return std::accumulate(nodes.begin(), end, 0, [](int sum, const auto& node) { return sum + node.slots; });
  }
};

Node::Node(Store store, int processes) : store_(std::move(store)), processes_(processes) { take_name(); }

void Node::take_name() {
  host_.clear();
  const auto mine = transport::random_name();
  for (int i = 1; host_.empty(); ++i) {
    const auto name = i == 1 ? name_of_this_host() : text(name_of_this_host(), "-", i);
    if (store_.compare_set("name of " + name_of_node(name), "", mine, soon()) == mine) host_ = name;
  }
  presence_ = cluster::show_presence(store_, name_of_node(host_));
}

std::optional<NodePlace> Node::wait(const NodeLimits& limits, const std::function<bool()>& stop, std::ostream& err) {
  auto deadline = Deadline::after(kForNodes);  // anew whenever a node comes or goes
  for (std::string told; !stop();) {
    std::string waits_for;
    if (auto place = come(limits, waits_for)) return place;
    if (!waits_for.empty() && waits_for != told) {
      told = waits_for;
      err << "lockstep: " << told << std::endl;
      deadline = Deadline::after(kForNodes);
    }
    if (deadline.passed()) throw DeadlineExceeded("waiting for other nodes", deadline.waited(), {}, ": " + told);
    std::this_thread::sleep_for(kBetweenNodesLooks);
  }
  return std::nullopt;
}

bool Node::has_ended(const std::string& host) const { return launch::has_ended(store_, name_of_node(host)); }

std::vector<MemberPlace> Node::members() const {
  return parse_places(store_.compare_set(cluster::kMembersNow, "", "", soon()));
}

// One look, and what follows from it: another node may change the entry meanwhile, and this one looks again.
std::optional<NodePlace> Node::come(const NodeLimits& limits, std::string& waits_for) {
  const auto before = store_.compare_set(kNodes, "", "", soon());
  auto found = Entry::parse(before);
  if (has_ended(host_)) take_name();  // it was stopped for some time, and the others do without it
  const auto change = [&] { store_.compare_set(kNodes, before, found.print(), soon()); };
  const auto self = found.find(host_);
  if (self == found.nodes.end()) {
    if (found.is_closed || !members().empty()) return join(limits, waits_for);
    found.nodes.push_back({host_, processes_});
    change();
    return std::nullopt;
  }
  if (found.is_closed) {
    return NodePlace{.host = host_,
                     .first = found.ranks_before(self),
                     .size = found.ranks_before(found.nodes.end()),
                     .joins = false};
  }
  if (std::erase_if(found.nodes, [&](const auto& node) { return node.name != host_ && has_ended(node.name); }) > 0) {
    change();
    return std::nullopt;
  }
  const int count = static_cast<int>(found.nodes.size());
  if (before != seen_) {
    seen_ = before;
    last_call_ = Deadline::after(std::chrono::duration<double>(limits.last_call_seconds));
  }
  const bool begins = count >= limits.most || (count >= limits.fewest && last_call_.passed());
  if (begins) {
    found.is_closed = true;
    change();
    return std::nullopt;
  }
  waits_for = count < limits.fewest
                  ? text("of at least ", limits.fewest, " nodes ", count, " have come: waiting for more")
                  : text(count, " nodes have come: waiting for more, up to ", limits.most, ", for ",
                         limits.last_call_seconds, " s");
  return std::nullopt;
}

std::optional<NodePlace> Node::join(const NodeLimits& limits, std::string& waits_for) {
  std::set<std::string> hosts;
  const auto now = members();
  for (const auto& member : now) hosts.insert(member.host);
  if (hosts.empty()) {  // it is about to begin, or never will
    const auto first = Entry::parse(entry(store_, kNodes)).nodes;
    if (!first.empty() &&
        std::all_of(first.begin(), first.end(), [&](const auto& node) { return has_ended(node.name); }))
      throw ClusterError(
          text("the job at ", store_.address(), " ended before it began: a new one needs another store, or name"));
    waits_for = "waiting for the job to begin, to join it";
    return std::nullopt;
  }
  if (std::all_of(hosts.begin(), hosts.end(), [&](const auto& host) { return has_ended(host); })) {
    throw ClusterError(text("the job at ", store_.address(), " has ended: a new one needs another store, or name"));
  }
  // Those that have been let in and are no members yet count too.
  const auto before_joining = store_.compare_set(kNodesThatJoin, "", "", soon());
  std::vector<std::string> joining;
  std::istringstream listed(before_joining);
  for (std::string host; listed >> host;) {
    if (!hosts.contains(host) && !has_ended(host)) joining.push_back(host);
  }
  if (static_cast<int>(hosts.size() + joining.size()) >= limits.most) {
    waits_for = text("the job runs on ", hosts.size() + joining.size(), " nodes, which may be ", limits.most,
                     ": waiting for one to leave");
    return std::nullopt;
  }
  joining.push_back(host_);
  const auto joined = lockstep::join(joining, "\n");
  if (store_.compare_set(kNodesThatJoin, before_joining, joined, soon()) != joined) return std::nullopt;
  const auto came = static_cast<int>(store_.add(kRanksThatCame, processes_, soon()));
  const auto found = Entry::parse(entry(store_, kNodes));
  const int before = found.nodes.empty() ? static_cast<int>(now.size()) : found.ranks_before(found.nodes.end());
  return NodePlace{.host = host_, .first = before + came - processes_, .size = before + came, .joins = true};
}

std::optional<std::vector<int>> Node::ranks_that_will_not_come() const {
  if (!entry(store_, cluster::kJobHasBegun).empty()) return std::nullopt;
  const auto first = Entry::parse(entry(store_, kNodes));
  std::vector<int> ranks;
  for (auto node = first.nodes.begin(); node != first.nodes.end(); ++node) {
    if (!has_ended(node->name)) continue;
    for (int i = 0; i < node->slots; ++i) ranks.push_back(first.ranks_before(node) + i);
  }
  return ranks;
}

namespace {

// True where the name, or address, is one of this machine's.
bool is_own(const std::string& host, const std::string& token) {
  try {
    transport::listen_at(transport::with_port(host, 0), {.token = token});  // closed at once
    return true;
  } catch (const Error&) {
    return false;
  }
}

// The launcher on the host that the address names holds it, if nobody does: `held` is then that store, by the address
// at which it listens. Nothing where stop() says so.
std::optional<Store> find_or_hold(const std::string& address, const Access& access, const std::function<bool()>& stop,
                                  std::ostream& err, std::optional<Store>& held) {
  const auto answers = [&] { return transport::answers_at(address, Deadline::after(kForAnswer)); };
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
      return Store::connect(address, Deadline::after(kToReachStore), access);
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

// Runs until the job has begun: where a node that was to begin it has ended, the others do not wait for its ranks.
void watch_beginning(const std::stop_token& stop, const Node& node, const JobStore& job) {
  for (; !stop.stop_requested(); std::this_thread::sleep_for(kBetweenPolls)) {
    const auto missing = node.ranks_that_will_not_come();
    if (!missing) return;
    for (const int rank : *missing) job.rank_will_not_come(rank);
  }
}

// Keeps this host's store while other members may need it to agree on who goes on. One that does not answer is lost
// when the training has ended, or when it has been silent for some time.
void hold_for_others(const Store& store, const Signals& signals) {
  using Sign = cluster::Liveness::Sign;
  store.set(cluster::key_of_end(kRanksHere), "reached", Deadline::after(kForStore));
  cluster::Liveness liveness(std::make_shared<cluster::ConnectedStores>(store),
                             {.seconds = kLongestSilenceSeconds, .looks = 1});
  const auto needs_this = [&](const std::string& address) {
    const auto sign = liveness.look(address, kRanksHere);
    return sign == Sign::lives || (sign == Sign::silent && entry(store, cluster::kMembersAtEnd).empty());
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
  std::optional<Store> held;
  const auto found = find_or_hold(options.store, access, stop, err, held);
  if (!found) return Supervisor::report_signal(asked, err);
  const bool in_etcd = cluster::is_etcd(options.store);
  const auto job = in_etcd ? by_its_first_address(*found) : *found;
  auto here = job;
  if (!in_etcd && !held) {
    const auto address = job.backend().local_address(Deadline::after(kForLocalAddress));
    here = Store::hold(transport::with_port(address, 0), access);
    here.set(kNodes, "1\n", Deadline::after(kForStore));  // closed: who comes to this store joins the job
  }
  Node node(job, options.processes.value_or(1));
  const auto place = node.wait(*options.nodes, stop, err);
  if (!place) return Supervisor::report_signal(asked, err);
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
  JobStore job_store(job, here);
  const auto policy = end_elastically({.restarts = options.restarts, .is_a_part = true}, job_store);
  std::jthread beginning;
  if (!place->joins) {
    beginning = std::jthread([&](const std::stop_token& ends) { watch_beginning(ends, node, job_store); });
  }
  Supervisor ranks(ranks_of(part, token.path()), {*policy, job_store, options.grace_seconds},
                   {signals, reaper, out, err});
  const int status = ranks.run();
  beginning = {};  // it has ended, or never began
  if (policy->restarts_before_new_start()) {
    err << "lockstep run: no worker is left that could take in others: start the job again on all nodes; it goes on "
           "from its last backup if it has one"
        << std::endl;
  }
  if (!in_etcd) hold_for_others(here, signals);
  return status;
}

}  // namespace lockstep::launch
