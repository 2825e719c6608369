#include "cluster/launch/attempt.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <limits>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "cluster/launch/job_store.h"
#include "cluster/liveness.h"
#include "cluster/rendezvous.h"
#include "cluster/store_backend.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kForNames(10), kForEtcd(10);
const std::string kNameOfHost = "host ";  // how the names of launchers on other hosts begin

std::string name_of(const std::string& host) { return kNameOfHost + host; }
std::string host_in(const std::string& name) { return name.substr(kNameOfHost.size()); }

std::string this_folder() {
  std::error_code failed;
  const auto folder = std::filesystem::current_path(failed);
  if (failed) throw IoError(text("lockstep run: the folder that this runs in is gone: ", failed.message()));
  return folder.string();
}

// A word for the shell at the other end of ssh.
std::string quoted(const std::string& word) {
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::optional<int> processes_of(const LaunchOptions& options) {
  if (options.workers == 0) return options.processes;
  return 1 + options.workers + options.servers + (options.evaluator ? 1 : 0);
}

std::string roles_of(const LaunchOptions& options) {
  if (options.workers == 0) return "";
  return text("worker:", options.workers, ",ps:", options.servers, options.evaluator ? ",evaluator:1" : "");
}

// The address at which the other hosts reach this one.
std::string address_for(const std::vector<HostSlots>& hosts) {
  const auto other =
      std::find_if(hosts.begin(), hosts.end(), [](const auto& host) { return !is_this_host(host.name); });
  return other == hosts.end()
             ? "127.0.0.1"
             : transport::address_towards(other->name.substr(other->name.find('@') + 1), Deadline::after(kForNames));
}

// With etcd each start has entries of its own.
Store make_store(const LaunchOptions& options, int restart, const std::vector<HostSlots>& hosts, const Access& access) {
  if (options.store.empty()) return Store::hold(transport::with_port(address_for(hosts), 0), access);
  const auto address = restart == 0 ? options.store : text(options.store, "-restart-", restart);
  return Store::connect(address, Deadline::after(kForEtcd), access);
}

HostPart part_of_job(const LaunchOptions& options, int restart, const Store& store, const TokenFile& token) {
  HostPart part{.size = 0,
                .store = store.address(),
                .roles = roles_of(options),
                .restart = restart,
                .command = options.command,
                .environment = options.environment,
                .log_dir = options.log_dir,
                .grace_seconds = options.grace_seconds,
                .restarts = options.restarts - restart,
                .trusted_network = options.trusted_network,
                .on_terminal = isatty(STDOUT_FILENO) == 1,
                .timeline = !options.timeline.empty(),
                .elastic = options.min_processes > 0,
                .token = token.digits()};
  if (!options.certificates.empty()) {
    part.environment[kCertificatesVariable] = std::filesystem::absolute(options.certificates).string();
  }
  return part;
}

}  // namespace

std::vector<ChildCommand> HostsOfJob::first_launchers(const std::vector<HostSlots>& hosts) {
  const int size = slots_of(hosts);
  std::vector<ChildCommand> launchers;
  for (const auto& host : hosts) launchers.push_back(launcher_of(host.name, host.slots, size, {}));
  return launchers;
}

// For hosts that are named and have no ranks. Those that are to leave do not count for --max-n any more.
std::vector<ChildCommand> HostsOfJob::newcomers(const Processes& all) {
  int room = options_.max_processes > 0 ? options_.max_processes : std::numeric_limits<int>::max();
  std::set<std::string> running;
  for (const auto& child : all.children()) {
    if (child->ended()) continue;
    running.insert(child->name());
    if (options_.max_processes > 0 && is_named(child->name())) room -= child->command().ranks;
  }
  std::vector<ChildCommand> came;
  for (const auto& host : discovery_->usable_hosts()) {
    if (room <= 0 || running.contains(name_of(host.name)) || found_nobody_.has(host.name)) continue;
    std::vector<std::string> stores;
    for (const auto& known : known_) {
      auto store = entry(store_, cluster::kStoreOfHost + known);
      if (!store.empty()) stores.push_back(std::move(store));
    }
    const int count = std::min(host.slots, room);
    room -= count;
    came.push_back(launcher_of(host.name, count, ranks_ + count, std::move(stores)));
  }
  return came;
}

ChildCommand HostsOfJob::launcher_of(const std::string& host, int count, int size, std::vector<std::string> stores) {
  auto part = part_;
  part.folder = this_folder();
  part.host = host;
  part.count = count;
  part.first = ranks_;
  part.size = size;
  part.known_stores = std::move(stores);
  ranks_ += count;
  known_.insert(host);
  const auto program = std::filesystem::read_symlink("/proc/self/exe").string();
  ChildCommand command{.name = name_of(host),
                       .command = {program, "run", "--part"},
                       .redraws = part.on_terminal,
                       .ranks = count,
                       .first_rank = part.first,
                       .ends_job = !part.roles.empty() && part.first == 0,
                       .holds_store = part.elastic,
                       .input = line_of(part)};
  if (is_this_host(host)) return command;
  std::istringstream words(options_.ssh);
  command.command = {std::istream_iterator<std::string>(words), {}};
  if (command.command.empty()) throw InvalidArgument("lockstep run: --ssh is empty");
  command.command.push_back(host);
  command.command.push_back(text("exec ", quoted(program), " run --part"));
  command.is_elsewhere = true;
  return command;
}

void HostsOfJob::lost(const std::string& name, bool found_nobody) {
  const auto host = host_in(name);
  const double seconds = found_nobody ? found_nobody_.add(host) : discovery_->leave_out(host);
  log_warning(text(name, " is left out for ", seconds, " s"));
}

bool HostsOfJob::is_named(const std::string& name) const {
  const auto hosts = discovery_->hosts();
  return std::any_of(hosts.begin(), hosts.end(), [&](const auto& host) { return name_of(host.name) == name; });
}

// True where the members on hosts that are named suffice, so that the others may leave.
bool HostsOfJob::enough_are_named() const {
  const auto members = places_of_members(store_);
  return std::count_if(members.begin(), members.end(),
                       [&](const auto& place) { return is_named(name_of(place.host)); }) >= options_.min_processes;
}

Attempt::Attempt(const LaunchOptions& options, int restart, const LauncherProcess& self, HostDiscovery* discovery)
    : hosts_(fill(options.hosts, processes_of(options))),
      store_(make_store(options, restart, hosts_, {token_.access().token, options.trusted_network})),
      presence_(options.store.empty() ? nullptr : cluster::show_presence(store_, kLauncher)),
      part_(part_of_job(options, restart, store_, token_)),
      job_store_(store_, store_),
      changing_hosts_(options, part_, store_, discovery),
      policy_(policy_of(part_, {.restarts = part_.restarts, .fewest = options.min_processes}, job_store_,
                        discovery == nullptr ? nullptr : &changing_hosts_)),
      job_(hosts_.empty() ? ranks_here(options) : changing_hosts_.first_launchers(hosts_),
           {.policy = *policy_, .store = job_store_, .grace_seconds = options.grace_seconds}, self) {}

std::vector<ChildCommand> Attempt::ranks_here(const LaunchOptions& options) const {
  auto part = part_;
  if (part.elastic) part.host_store = part.store;
  part.size = part.count = processes_of(options).value_or(1);
  return ranks_of(part, token_.path());
}

std::vector<std::string> Attempt::hosts_that_may_train() const {
  const auto members = places_of_members(store_);
  std::vector<std::string> hosts;
  for (const auto& launcher : job_.processes().children()) {
    if (!launcher->ended_without_word()) continue;
    const auto& part = launcher->command();
    const auto is_there = [&](const MemberPlace& place) {
      return place.rank >= part.first_rank && place.rank < part.first_rank + part.ranks;
    };
    if (!members.empty() && std::none_of(members.begin(), members.end(), is_there)) continue;
    const auto host = host_in(part.name);
    if (std::find(hosts.begin(), hosts.end(), host) == hosts.end()) hosts.push_back(host);
  }
  return hosts;
}

}  // namespace lockstep::launch
