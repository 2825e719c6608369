#include "launch/nodes.h"

#include <algorithm>
#include <numeric>
#include <ostream>
#include <set>
#include <sstream>
#include <thread>

#include "base/text.h"
#include "cluster/rendezvous.h"
#include "launch/hosts.h"
#include "launch/job_store.h"
#include "lockstep/base/error.h"
#include "transport/all_gather.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::minutes kForNodes(10);
constexpr std::chrono::milliseconds kBetweenNodesLooks(100);
constexpr const char *kNodes = "nodes", *kRanksThatCame = "ranks of nodes that came later",
                     *kNodesThatJoin = "nodes that join";

std::string key_of_end(const std::string& host) { return "end of node " + host; }

Deadline soon() { return Deadline::after(std::chrono::seconds(10)); }

}  // namespace

// Of all nodes with which the job begins: a host and its number of ranks a line, behind whether no other may come.
struct Node::Entry {
  struct Line {
    std::string host;
    int processes = 0;
  };
  bool is_closed = false;
  std::vector<Line> nodes;

  static Entry parse(const std::string& printed) {
    Entry entry;
    std::istringstream in(printed);
    in >> entry.is_closed;
    for (Line line; in >> line.host >> line.processes;) entry.nodes.push_back(line);
    return entry;
  }
  std::string print() const {
    auto printed = text(is_closed ? 1 : 0, "\n");
    for (const auto& [host, processes] : nodes) printed += text(host, " ", processes, "\n");
    return printed;
  }
  std::vector<Line>::const_iterator find(const std::string& host) const {
    return std::find_if(nodes.begin(), nodes.end(), [&](const auto& node) { return node.host == host; });
  }
  int ranks_before(std::vector<Line>::const_iterator end) const {
    return std::accumulate(nodes.begin(), end, 0, [](int sum, const auto& node) { return sum + node.processes; });
  }
};

Node::Node(Store store, int processes) : store_(std::move(store)), processes_(processes) { take_name(); }

void Node::take_name() {
  host_.clear();
  const auto mine = transport::random_name();
  for (int i = 1; host_.empty(); ++i) {
    const auto name = i == 1 ? name_of_this_host() : text(name_of_this_host(), "-", i);
    if (store_.compare_set("name of node " + name, "", mine, soon()) == mine) host_ = name;
  }
  presence_ = store_.set_at_end(key_of_end(host_), "reached", soon());
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

bool Node::has_ended(const std::string& host) const { return !entry(store_, key_of_end(host)).empty(); }

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
  if (std::erase_if(found.nodes, [&](const auto& node) { return node.host != host_ && has_ended(node.host); }) > 0) {
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
        std::all_of(first.begin(), first.end(), [&](const auto& node) { return has_ended(node.host); }))
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
    if (!has_ended(node->host)) continue;
    for (int i = 0; i < node->processes; ++i) ranks.push_back(first.ranks_before(node) + i);
  }
  return ranks;
}

void close_nodes(const Store& store, Deadline deadline) { store.set(kNodes, "1\n", deadline); }

}  // namespace lockstep::launch
