#include "launch/attempt.h"

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
#include "cluster/rendezvous.h"
#include "cluster/store_backend.h"
#include "launch/hosts.h"
#include "launch/job_store.h"
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

// How the launcher of the part's host is started.
ChildCommand launcher_of(const HostPart& part, const std::string& ssh) {
  const auto program = std::filesystem::read_symlink("/proc/self/exe").string();
  ChildCommand command{.name = name_of(part.host),
                       .command = {program, "run", "--part"},
                       .redraws = part.on_terminal,
                       .ranks = part.count,
                       .first_rank = part.first,
                       .ends_job = !part.roles.empty() && part.first == 0,
                       .input = line_of(part)};
  if (is_this_host(part.host)) return command;
  std::istringstream words(ssh);
  command.command = {std::istream_iterator<std::string>(words), {}};
  if (command.command.empty()) throw InvalidArgument("lockstep run: --ssh is empty");
  command.command.push_back(part.host);
  command.command.push_back(text("exec ", quoted(program), " run --part"));
  command.is_elsewhere = true;
  return command;
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

}  // namespace

Attempt::Attempt(const LaunchOptions& options, int restart, const JobProcesses::Context& context,
                 HostDiscovery* discovery)
    : options_(options),
      restart_(restart),
      discovery_(discovery),
      found_nobody_(options.blacklist_seconds),
      hosts_(fill(options.hosts, processes_of(options))),
      store_(make_store()),
      job_(members(),
           {.grace_seconds = options.grace_seconds,
            .restarts = options.restarts - restart,
            .elastic = options.min_processes > 0,
            .fewest = options.min_processes},
           watched(context)) {}

std::vector<std::string> Attempt::hosts_that_may_train() const {
  const auto members = places_of_members(store_);
  std::vector<std::string> hosts;
  for (const auto& launcher : job_.launchers_without_word()) {
    const auto is_there = [&](const MemberPlace& place) {
      return place.rank >= launcher.first_rank && place.rank < launcher.first_rank + launcher.ranks;
    };
    if (!members.empty() && std::none_of(members.begin(), members.end(), is_there)) continue;
    const auto host = host_in(launcher.name);
    if (std::find(hosts.begin(), hosts.end(), host) == hosts.end()) hosts.push_back(host);
  }
  return hosts;
}

JobProcesses::Context Attempt::watched(JobProcesses::Context context) {
  context.ended = [this](int rank) { tell_that_it_ended([this] { return store_; }, rank); };
  use_store(context, store_);
  if (discovery_ == nullptr) return context;
  context.more = [this](const JobProcesses& job) { return hosts_that_came(job); };
  context.is_to_leave = [this](const std::string& name) { return !is_named(name) && enough_are_named(); };
  context.lost = [this](const std::string& name, bool found_nobody) { leave_out(name, found_nobody); };
  return context;
}

void Attempt::leave_out(const std::string& name, bool found_nobody) {
  const auto host = host_in(name);
  const double seconds = found_nobody ? found_nobody_.add(host) : discovery_->leave_out(host);
  log_warning(text(name, " is left out for ", seconds, " s"));
}

// Launchers for hosts that are named and have no ranks. Those that are to leave do not count for --max-n any more.
std::vector<ChildCommand> Attempt::hosts_that_came(const JobProcesses& job) {
  std::vector<ChildCommand> came;
  int room = std::numeric_limits<int>::max();
  if (options_.max_processes > 0) {
    room = options_.max_processes - job.ranks([this](const std::string& name) { return is_named(name); });
  }
  for (const auto& host : discovery_->usable_hosts()) {
    if (room <= 0 || job.runs(name_of(host.name)) || found_nobody_.has(host.name)) continue;
    auto part = part_of_job();
    part.folder = this_folder();
    part.host = host.name;
    part.count = std::min(host.slots, room);
    part.first = ranks_;
    ranks_ += part.count;
    part.size = ranks_;
    for (const auto& known : known_) {
      auto store = entry(store_, cluster::kStoreOfHost + known);
      if (!store.empty()) part.known_stores.push_back(std::move(store));
    }
    known_.insert(host.name);
    room -= part.count;
    came.push_back(launcher_of(part, options_.ssh));
  }
  return came;
}

bool Attempt::is_named(const std::string& name) const {
  const auto hosts = discovery_->hosts();
  return std::any_of(hosts.begin(), hosts.end(), [&](const auto& host) { return name_of(host.name) == name; });
}

// True where the members on hosts that are named suffice, so that the others may leave.
bool Attempt::enough_are_named() const {
  const auto members = places_of_members(store_);
  return std::count_if(members.begin(), members.end(),
                       [&](const auto& place) { return is_named(name_of(place.host)); }) >= options_.min_processes;
}

// With etcd others learn by its entry that this launcher has ended, and each start has entries of its own.
Store Attempt::make_store() {
  if (options_.store.empty()) return Store::hold(transport::with_port(address_for(hosts_), 0), access());
  const auto address = restart_ == 0 ? options_.store : text(options_.store, "-restart-", restart_);
  auto store = Store::connect(address, Deadline::after(kForEtcd), access());
  presence_ = store.set_at_end(kEndOfLauncher, "reached", Deadline::after(kForEtcd));
  return store;
}

HostPart Attempt::part_of_job() const {
  HostPart part{.size = 0,
                .store = store_.address(),
                .roles = roles_of(options_),
                .restart = restart_,
                .command = options_.command,
                .environment = options_.environment,
                .log_dir = options_.log_dir,
                .grace_seconds = options_.grace_seconds,
                .restarts = options_.restarts - restart_,
                .trusted_network = options_.trusted_network,
                .on_terminal = isatty(STDOUT_FILENO) == 1,
                .timeline = !options_.timeline.empty(),
                .elastic = options_.min_processes > 0,
                .token = token_.digits()};
  if (!options_.certificates.empty()) {
    part.environment[kCertificatesVariable] = std::filesystem::absolute(options_.certificates).string();
  }
  return part;
}

std::vector<ChildCommand> Attempt::members() {
  auto part = part_of_job();
  if (hosts_.empty()) {
    if (part.elastic) part.host_store = part.store;
    part.size = part.count = processes_of(options_).value_or(1);
    return ranks_of(part, token_.path());
  }
  part.folder = this_folder();
  for (const auto& host : hosts_) part.size += host.slots;
  std::vector<ChildCommand> members;
  for (const auto& host : hosts_) {
    part.host = host.name;
    part.count = host.slots;
    members.push_back(launcher_of(part, options_.ssh));
    part.first += host.slots;
    known_.insert(host.name);
  }
  ranks_ = part.size;
  return members;
}

}  // namespace lockstep::launch
