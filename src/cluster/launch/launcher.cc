#include "cluster/launch/launcher.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <ostream>
#include <thread>
#include <utility>

#include "base/text.h"
#include "cluster/launch/attempt.h"
#include "cluster/launch/host_part.h"
#include "cluster/launch/other_launcher.h"
#include "cluster/launch/supervisor.h"
#include "cluster/resolvers.h"
#include "cluster/store_backend.h"
#include "cluster/store_texts.h"
#include "lockstep/base/error.h"
#include "transport/connections.h"
#include "transport/socket.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kForHosts(600);
constexpr std::chrono::seconds kForTimelines(60);  // the store is this process's own
constexpr double kToHearOfTheEndSeconds = 10;

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

// The address in etcd, with a name for the job where the user gave none.
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
  int processes =
      options.hosts.empty() ? options.processes.value_or(1) : slots_of(fill(options.hosts, options.processes));
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

// Waits until the hosts have room for the processes with which the job begins. Returns no hosts where a signal ended
// the wait; `asked` is then that signal.
std::vector<HostSlots> first_hosts(HostDiscovery& discovery, const LaunchOptions& options, const Signals& signals,
                                   std::ostream& err, int& asked) {
  const auto deadline = Deadline::after(kForHosts);
  for (int told = -1;;) {
    const bool is_late = deadline.passed();
    auto hosts = is_late ? discovery.hosts() : discovery.usable_hosts();  // at last those that failed, too
    const bool some_failed = hosts.size() < discovery.hosts().size();
    const int slots = slots_of(hosts);
    const int needed = processes_at_least(options);
    if (slots >= needed) {
      const int most = options.max_processes > 0 ? std::min(slots, options.max_processes) : slots;
      return fill(std::move(hosts), most);
    }
    const auto what = text("the hosts of --host-discovery have ", slots, " slot(s)",
                           some_failed ? " without those that failed" : "", ", and ", needed, " are needed");
    if (is_late) throw ClusterError(text("lockstep run: ", what, "; waited for ", kForHosts.count(), " s"));
    if (std::exchange(told, slots) != slots) err << "lockstep: " << what << ": waiting for more" << std::endl;
    if ((asked = signals.next()) != 0) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

// The other launchers of a job that is not elastic end their ranks when this one has been silent for some time. Until
// then a job that starts again would write the files of the first one beside them. Returns the signal that ended the
// wait, or 0.
int wait_for_ends(const std::vector<std::string>& hosts, const LaunchOptions& options, const Signals& signals,
                  std::ostream& err) {
  if (hosts.empty()) return 0;
  const auto seconds = kLongSilenceSeconds + options.grace_seconds + kToHearOfTheEndSeconds;
  err << "lockstep run: the connection to " << join(hosts) << " broke, and processes of this job may still run there: "
      << "they end themselves, and the job starts again in " << seconds << " s" << std::endl;
  int asked = 0;
  const auto deadline = Deadline::after(std::chrono::duration<double>(seconds));
  while (!deadline.passed() && (asked = signals.next()) == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return asked;
}

// --timeline. Throws IoError where the file cannot be written.
void require_writable(const std::string& path) {
  errno = 0;
  if (!std::ofstream(path)) throw IoError(text("cannot write the timeline ", path, ": ", std::strerror(errno)));
}

// Writes the timelines in a job's store to one file for chrome://tracing and ui.perfetto.dev. Prints errors on `err`:
// they do not fail the job.
void write_timelines(const std::string& path, const Store& store, std::ostream& err) {
  try {
    std::ofstream file(path);
    file << "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [";
    const char* separator = "";
    for (const auto& events : cluster::published_texts(store, cluster::kTimelines, Deadline::after(kForTimelines))) {
      if (events.size() <= 2) continue;  // an empty array
      file << separator << events.substr(1, events.size() - 2);
      separator = ",\n";
    }
    file << "]}\n";
    if (!file.flush())
      err << "lockstep run: the timeline " << path << " is not whole: the disk may be full" << std::endl;
  } catch (const Error& error) {
    err << "lockstep run: the timeline " << path << " is not whole: " << error.what() << std::endl;
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
    discovery.emplace(options.host_discovery, options.blacklist_seconds);
    options.processes.reset();
  }
  for (int restart = 0;; ++restart) {
    if (discovery) {
      int asked = 0;
      options.hosts = first_hosts(*discovery, given, signals, err, asked);
      if (asked != 0) return Supervisor::report_signal(asked, err);
    }
    Attempt attempt(options, restart, {signals, reaper, out, err}, discovery ? &*discovery : nullptr);
    const auto& job = attempt.job();
    const int status = attempt.job().run();
    if (!options.timeline.empty()) write_timelines(options.timeline, attempt.store(), err);
    const auto restarts_used = attempt.policy().restarts_before_new_start();
    if (!job.failed() || job.was_asked_to_end() || !restarts_used) return status;
    const bool is_elastic = options.min_processes > 0;
    if (is_elastic) err << "lockstep run: no worker is left that could take in others" << std::endl;
    restart += *restarts_used;
    if (restart >= options.restarts) return status;
    const auto cut_off = attempt.hosts_that_may_train();
    if (is_elastic && !cut_off.empty()) {  // they go on without a launcher, for as long as the training takes
      err << "lockstep run: the connection to " << join(cut_off)
          << " broke, and the workers there may still train: the "
          << "job is not started again beside them. Start it again when they have ended; it goes on from its last "
             "backup "
          << "if it has one" << std::endl;
      return status;
    }
    if (const int asked = wait_for_ends(cut_off, options, signals, err)) return Supervisor::report_signal(asked, err);
    err << "lockstep run: " << (is_elastic ? "the whole job starts again, from its last backup if it has one: " : "")
        << "restart " << restart + 1 << " of " << options.restarts << std::endl;
  }
}

}  // namespace lockstep::launch
