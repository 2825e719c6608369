#include "launch/launcher.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <ostream>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "cluster/rendezvous.h"
#include "cluster/resolvers.h"
#include "cluster/store_backend.h"
#include "launch/host_discovery.h"
#include "launch/host_part.h"
#include "launch/job_store.h"
#include "launch/processes.h"
#include "launch/timeline_file.h"
#include "launch/token_file.h"
#include "lockstep/base/error.h"
#include "lockstep/cluster/store.h"
#include "transport/all_gather.h"
#include "transport/socket.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kForHosts(600), kForNames(10), kForEtcd(10);

// With which a job of discovered hosts begins.
int processes_at_least(const LaunchOptions& options) {
  return std::max(options.min_processes, options.processes.value_or(1));
}

// Nodes start by themselves: what one launcher decides for all hosts has no place there.
void check_node(const LaunchOptions& options) {
  const auto refuse = [](bool is_given, const char* name) {
    if (is_given) throw InvalidArgument(text("lockstep run: ", name, " does not go with --nnodes"));
  };
  refuse(!options.hosts.empty(), "-H or --hostfile");
  refuse(!options.host_discovery.empty(), "--host-discovery");
  refuse(options.min_processes > 0, "--min-n (the program's min_workers says it)");
  refuse(options.workers > 0, "--workers and --ps");
  refuse(!options.certificates.empty(), "--certs");
  refuse(!options.timeline.empty(), "--timeline");
  refuse(!options.environment.empty(), "-x (each node has its own environment)");
  if (options.store.empty()) {
    throw InvalidArgument(
        "lockstep run: --nnodes needs --store, where the nodes find each other: host:port, with a host on which one of "
        "them is started, or etcd://host:2379,host:2379,host:2379/name-of-the-job");
  }
  if (cluster::is_etcd(options.store)) cluster::parse_etcd(options.store);
  if (!(options.nodes->last_call_seconds >= 0)) {
    throw InvalidArgument(
        text("lockstep run: --last-call is ", options.nodes->last_call_seconds, "; it must be 0 or more seconds"));
  }
}

// Of etcd, with a name for the job where the user gave none.
std::string with_job(const std::string& store) {
  const auto slash = store.find('/', std::string(cluster::kEtcdScheme).size());
  return store.empty() || slash != std::string::npos ? store : text(store, "/", transport::random_name());
}

// Each host would look for the cluster at itself.
void require_reachable_etcd(const LaunchOptions& options) {
  const auto is_elsewhere = [](const HostSlots& host) { return !is_this_host(host.name); };
  const bool others = std::any_of(options.hosts.begin(), options.hosts.end(), is_elsewhere);
  if (!cluster::is_etcd(options.store) || (!others && options.host_discovery.empty())) return;
  for (const auto& endpoint : cluster::parse_etcd(with_job(options.store)).endpoints) {
    if (!transport::is_loopback(cluster::host_of(endpoint, "--store"))) continue;
    throw InvalidArgument(text("lockstep run: --store names etcd at ", endpoint,
                               ", which other hosts do not reach: give the address by which they do"));
  }
}

void check(const LaunchOptions& options) {
  const auto require = [](bool holds, const char* name, auto value, const char* allowed) {
    if (!holds) throw InvalidArgument(text("lockstep run: ", name, " is ", value, "; it must be ", allowed));
  };
  require(options.processes.value_or(1) >= 1, "-n", options.processes.value_or(1), "at least 1");
  require(options.restarts >= 0, "--restarts", options.restarts, "0 or more");
  require(options.grace_seconds >= 0, "--grace", options.grace_seconds, "0 or more seconds");
  require(options.workers >= 0, "--workers", options.workers, "0 or more");
  require(options.servers >= 0, "--ps", options.servers, "0 or more");
  if ((options.workers > 0) != (options.servers > 0) || (options.evaluator && options.workers == 0)) {
    throw InvalidArgument("lockstep run: parameter servers need both --workers and --ps, with a number above 0 each");
  }
  if (options.workers > 0 && options.processes) {
    throw InvalidArgument(
        "lockstep run: -n and --workers are both given; with --workers and --ps the number of processes is known");
  }
  int processes = options.processes.value_or(1);
  if (!options.hosts.empty()) {
    processes = 0;
    for (const auto& host : fill(options.hosts, options.processes)) processes += host.slots;
  }
  if (!options.host_discovery.empty()) processes = std::max(processes, options.min_processes);
  if (options.min_processes < 0 || options.min_processes > processes) {
    throw InvalidArgument(text("lockstep run: --min-n is ", options.min_processes,
                               "; it must be from 1 to the number of processes (", processes, ")"));
  }
  require(options.max_processes >= 0, "--max-n", options.max_processes, "0 or more");
  require(options.blacklist_seconds > 0, "--blacklist-cooldown", options.blacklist_seconds, "above 0 seconds");
  if (options.max_processes > 0 && options.max_processes < processes_at_least(options)) {
    throw InvalidArgument(text("lockstep run: --max-n is ", options.max_processes, ", and ",
                               processes_at_least(options), " processes are to begin"));
  }
  if (options.host_discovery.empty() ? options.max_processes > 0 : options.min_processes == 0) {
    throw InvalidArgument("lockstep run: --host-discovery needs --min-n, and --max-n needs --host-discovery");
  }
  if (options.nodes) check_node(options);
  if (!options.nodes && !options.store.empty() && !cluster::is_etcd(options.store)) {
    throw InvalidArgument(text("lockstep run: --store is \"", options.store,
                               "\"; without --nnodes it must be as etcd://host:2379,host:2379,host:2379"));
  }
  require_reachable_etcd(options);
  if (!options.nodes && !options.store.empty() && options.min_processes == 0) {
    throw InvalidArgument("lockstep run: --store needs --min-n or --nnodes: only an elastic job can use another store");
  }
  if (options.command.empty()) throw InvalidArgument("lockstep run: there is no program to run");
}

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

std::string name_of(const std::string& host) { return "host " + host; }

// How the launcher of the part's host is started.
ChildCommand launcher_of(const HostPart& part, const std::string& ssh) {
  const auto program = std::filesystem::read_symlink("/proc/self/exe").string();
  ChildCommand command{.name = name_of(part.host),
                       .command = {program, "run", "--part"},
                       .redraws = part.on_terminal,
                       .ranks = part.count,
                       .ends_job = !part.roles.empty() && part.first == 0,
                       .input = line_of(part)};
  if (is_this_host(part.host)) return command;
  std::istringstream words(ssh);
  command.command = {std::istream_iterator<std::string>(words), {}};
  if (command.command.empty()) throw InvalidArgument("lockstep run: --ssh is empty");
  command.command.push_back(part.host);
  command.command.push_back(text("exec ", quoted(program), " run --part"));
  return command;
}

// One run of a job between restarts, with a token and a store of its own.
class Attempt {
 public:
  Attempt(const LaunchOptions& options, int restart, const JobProcesses::Context& context,
          HostDiscovery* discovery = nullptr)
      : options_(options),
        discovery_(discovery),
        blacklist_(options.blacklist_seconds),
        hosts_(fill(options.hosts, processes(options))),
        store_(store_for(options, restart)),
        job_(members(options, restart),
             {.grace_seconds = options.grace_seconds,
              .restarts = options.restarts - restart,
              .elastic = options.min_processes > 0,
              .fewest = options.min_processes},
             watched(context)) {}

  JobProcesses& job() { return job_; }
  const Store& store() const { return store_; }

 private:
  JobProcesses::Context watched(JobProcesses::Context context) {
    context.ended = [this](int rank) { tell_that_it_ended([this] { return store_; }, rank); };
    use_store(context, store_);
    if (discovery_ == nullptr) return context;
    context.more = [this](const JobProcesses& job) { return hosts_that_came(job); };
    context.is_to_leave = [this](const std::string& name) { return !is_named(name) && enough_are_named(); };
    context.lost = [this](const std::string& name) {
      log_warning(text(name, " is left out for ", blacklist_.add(name), " s"));
    };
    return context;
  }

  // Launchers for hosts that are named and have no ranks. Those that are to leave do not count for --max-n any more.
  std::vector<ChildCommand> hosts_that_came(const JobProcesses& job) {
    std::vector<ChildCommand> came;
    int room = std::numeric_limits<int>::max();
    if (options_.max_processes > 0) {
      room = options_.max_processes - job.ranks([this](const std::string& name) { return is_named(name); });
    }
    for (const auto& host : discovery_->hosts()) {
      const auto name = name_of(host.name);
      if (room <= 0 || job.runs(name) || blacklist_.has(name)) continue;
      auto part = part_of_job(options_, 0);
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

  bool is_named(const std::string& name) {
    const auto hosts = discovery_->hosts();
    return std::any_of(hosts.begin(), hosts.end(), [&](const auto& host) { return name_of(host.name) == name; });
  }

  // Whether those on hosts that are named suffice, so that the others may leave.
  bool enough_are_named() {
    const auto members = places_of_members(store_);
    return std::count_if(members.begin(), members.end(),
                         [&](const auto& place) { return is_named(name_of(place.host)); }) >= options_.min_processes;
  }

  static std::optional<int> processes(const LaunchOptions& options) {
    if (options.workers == 0) return options.processes;
    return 1 + options.workers + options.servers + (options.evaluator ? 1 : 0);
  }

  static std::string roles(const LaunchOptions& options) {
    if (options.workers == 0) return "";
    return text("worker:", options.workers, ",ps:", options.servers, options.evaluator ? ",evaluator:1" : "");
  }

  // The address at which the other hosts reach this one.
  static std::string address_for(const std::vector<HostSlots>& hosts) {
    const auto other =
        std::find_if(hosts.begin(), hosts.end(), [](const auto& host) { return !is_this_host(host.name); });
    return other == hosts.end()
               ? "127.0.0.1"
               : transport::address_towards(other->name.substr(other->name.find('@') + 1), Deadline::after(kForNames));
  }

  // With etcd others learn by its entry that this launcher has ended, and each start has entries of its own.
  Store store_for(const LaunchOptions& options, int restart) {
    if (options.store.empty()) return Store::hold(transport::with_port(address_for(hosts_), 0), access(options));
    const auto address = restart == 0 ? options.store : text(options.store, "-restart-", restart);
    auto store = Store::connect(address, Deadline::after(kForEtcd), access(options));
    presence_ = store.set_at_end(kEndOfLauncher, "reached", Deadline::after(kForStore));
    return store;
  }

  Access access(const LaunchOptions& options) const { return {token_.access().token, options.trusted_network}; }

  HostPart part_of_job(const LaunchOptions& options, int restart) const {
    HostPart part{.size = 0,
                  .store = store_.address(),
                  .roles = roles(options),
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
                  .token = token_.digits()};
    if (!options.certificates.empty()) {
      part.environment[kCertificatesVariable] = std::filesystem::absolute(options.certificates).string();
    }
    return part;
  }

  std::vector<ChildCommand> members(const LaunchOptions& options, int restart) {
    auto part = part_of_job(options, restart);
    if (hosts_.empty()) {
      if (part.elastic) part.host_store = part.store;
      part.size = part.count = processes(options).value_or(1);
      return ranks_of(part, token_.path());
    }
    part.folder = this_folder();
    for (const auto& host : hosts_) part.size += host.slots;
    std::vector<ChildCommand> members;
    for (const auto& host : hosts_) {
      part.host = host.name;
      part.count = host.slots;
      members.push_back(launcher_of(part, options.ssh));
      part.first += host.slots;
      known_.insert(host.name);
    }
    ranks_ = part.size;
    return members;
  }

  const LaunchOptions& options_;
  HostDiscovery* const discovery_;  // null: the hosts are those that the user named
  Blacklist blacklist_;
  std::set<std::string> known_;  // hosts
  int ranks_ = 0;                // numbered so far
  const TokenFile token_;
  const std::vector<HostSlots> hosts_;
  std::shared_ptr<void> presence_;  // in etcd
  const Store store_;
  JobProcesses job_;
};

}  // namespace

std::map<std::string, std::string> exported_variables(const std::vector<std::string>& names) {
  std::map<std::string, std::string> variables;
  for (const auto& entry : names) {
    const auto equals = entry.find('=');
    const auto name = entry.substr(0, equals);
    const char* const here = std::getenv(name.c_str());
    if (name.empty() || (equals == std::string::npos && here == nullptr)) {
      throw InvalidArgument(text("lockstep run: -x ", entry, ": there is no such variable here"));
    }
    variables[name] = equals == std::string::npos ? here : entry.substr(equals + 1);
  }
  return variables;
}

namespace {

// Waits until the hosts have room for the processes with which the job begins. Empty where a signal ended that, which
// is then `asked`.
std::vector<HostSlots> first_hosts(HostDiscovery& discovery, const LaunchOptions& options, const Signals& signals,
                                   std::ostream& err, int& asked) {
  const auto deadline = Deadline::after(kForHosts);
  for (int told = -1;;) {
    auto hosts = discovery.hosts();
    int slots = 0;
    for (const auto& host : hosts) slots += host.slots;
    const int needed = processes_at_least(options);
    if (slots >= needed) {
      const int most = options.max_processes > 0 ? std::min(slots, options.max_processes) : slots;
      return fill(std::move(hosts), most);
    }
    const auto what = text("the hosts of --host-discovery have ", slots, " slot(s), and ", needed, " are needed");
    if (deadline.passed()) throw ClusterError(text("lockstep run: ", what, "; waited for ", kForHosts.count(), " s"));
    if (std::exchange(told, slots) != slots) err << "lockstep: " << what << ": waiting for more" << std::endl;
    if ((asked = signals.next()) != 0) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

}  // namespace

int launch(const LaunchOptions& given, std::ostream& out, std::ostream& err) {
  check(given);
  if (given.nodes) return launch_node(given, out, err);
  auto options = given;
  options.store = with_job(options.store);
  if (options.hosts.empty()) make_folder(options.log_dir);
  if (!options.timeline.empty()) require_writable(options.timeline);
  const Reaper reaper;
  const Signals signals;
  std::optional<HostDiscovery> discovery;
  if (!options.host_discovery.empty()) {
    discovery.emplace(options.host_discovery);
    options.processes.reset();
  }
  for (int restart = 0;; ++restart) {
    if (discovery) {
      int asked = 0;
      options.hosts = first_hosts(*discovery, given, signals, err, asked);
      if (asked != 0) return JobProcesses::report_signal(asked, err);
    }
    Attempt attempt(options, restart, {signals, reaper, out, err}, discovery ? &*discovery : nullptr);
    const auto& job = attempt.job();
    const int status = attempt.job().run();
    if (!options.timeline.empty()) write_timelines(options.timeline, attempt.store(), err);
    if (!job.failed() || job.was_asked_to_end() || options.workers > 0) return status;
    const bool is_elastic = options.min_processes > 0;
    if (is_elastic && !job.nobody_is_left()) return status;
    if (is_elastic) err << "lockstep run: no worker is left that could take in others" << std::endl;
    if (is_elastic) restart += job.restarts_used();
    if (restart >= options.restarts) return status;
    err << "lockstep run: " << (is_elastic ? "the whole job starts again, from its last backup if it has one: " : "")
        << "restart " << restart + 1 << " of " << options.restarts << std::endl;
  }
}

}  // namespace lockstep::launch
