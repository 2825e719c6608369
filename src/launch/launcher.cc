#include "launch/launcher.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <ostream>
#include <sstream>

#include "base/text.h"
#include "cluster/rendezvous.h"
#include "launch/host_part.h"
#include "launch/processes.h"
#include "launch/timeline_file.h"
#include "launch/token_file.h"
#include "lockstep/base/error.h"
#include "lockstep/cluster/store.h"
#include "transport/socket.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kToHearWhatToRun(60);

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
  const int processes = options.processes.value_or(1);
  if (options.min_processes < 0 || options.min_processes > processes) {
    throw InvalidArgument(
        text("lockstep run: --min-n is ", options.min_processes, "; it must be from 1 to -n (", processes, ")"));
  }
  if (options.min_processes > 0 && !options.hosts.empty()) {
    throw InvalidArgument("lockstep run: --min-n is for the processes of this host, and -H or --hostfile names hosts");
  }
  if (options.command.empty()) throw InvalidArgument("lockstep run: there is no program to run");
}

void make_folder(const std::string& path) {
  std::error_code failed;
  if (!path.empty()) std::filesystem::create_directories(path, failed);
  if (failed) throw IoError(text("cannot make ", path, ": ", failed.message()));
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

// How the launcher of the part's host is started.
ChildCommand launcher_of(const HostPart& part, const std::string& ssh) {
  const auto program = std::filesystem::read_symlink("/proc/self/exe").string();
  ChildCommand command{.name = "host " + part.host,
                       .command = {program, "run", "--part"},
                       .redraws = part.on_terminal,
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

constexpr std::chrono::seconds kForNames(10), kForLastWords(2);

// A rank that has ended will not come to the job's rendezvous any more: ranks that wait for it there get
// an error now. Where the store cannot be told, their deadlines apply.
void tell_that_it_ended(const std::function<Store()>& store, int rank) {
  try {
    store().fail_waiters("generation 0/", text("rank ", rank, " has ended, and others wait for it"),
                         Deadline::after(kForLastWords), text("/rank ", rank));
  } catch (const Error&) {
  }
}

// Empty where there is none.
std::string entry(const Store& store, const char* key) {
  try {
    return store.compare_set(key, "", "", Deadline::after(kForLastWords));
  } catch (const Error&) {
    return {};
  }
}

// One run of a job between restarts, with a token and a store of its own.
class Attempt {
 public:
  Attempt(const LaunchOptions& options, int restart, const JobProcesses::Context& context)
      : hosts_(fill(options.hosts, processes(options))),
        store_(Store::hold(transport::with_port(address_for(hosts_), 0), access(options))),
        job_(members(options, restart),
             {.grace_seconds = options.grace_seconds, .restarts = options.restarts, .fewest = options.min_processes},
             with_store(context)) {}

  JobProcesses& job() { return job_; }
  const Store& store() const { return store_; }

 private:
  JobProcesses::Context with_store(JobProcesses::Context context) const {
    context.ended = [this](int rank) { tell_that_it_ended([this] { return store_; }, rank); };
    context.has_begun = [this] { return !entry(store_, cluster::kJobHasBegun).empty(); };
    context.was_left_out = [this](int rank) {
      const auto members = entry(store_, cluster::kMembersAtEnd);
      return !members.empty() && ("\n" + members).find(text("\nprocess ", rank, "\n")) == std::string::npos;
    };
    return context;
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

  Access access(const LaunchOptions& options) const { return {token_.access().token, options.trusted_network}; }

  std::vector<ChildCommand> members(const LaunchOptions& options, int restart) const {
    HostPart part{.size = 0,
                  .store = store_.address(),
                  .roles = roles(options),
                  .restart = restart,
                  .command = options.command,
                  .environment = options.environment,
                  .log_dir = options.log_dir,
                  .grace_seconds = options.grace_seconds,
                  .restarts = options.restarts,
                  .trusted_network = options.trusted_network,
                  .on_terminal = isatty(STDOUT_FILENO) == 1,
                  .timeline = !options.timeline.empty(),
                  .token = token_.digits()};
    if (!options.certificates.empty()) {
      part.environment[kCertificatesVariable] = std::filesystem::absolute(options.certificates).string();
    }
    if (hosts_.empty()) {
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
    }
    return members;
  }

  const TokenFile token_;
  const std::vector<HostSlots> hosts_;
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

int launch(const LaunchOptions& options, std::ostream& out, std::ostream& err) {
  check(options);
  if (options.hosts.empty()) make_folder(options.log_dir);
  if (!options.timeline.empty()) require_writable(options.timeline);
  const Reaper reaper;
  const Signals signals;
  const bool of_processes = options.workers > 0 || options.min_processes > 0;
  const int restarts_of_job = of_processes ? 0 : options.restarts;
  for (int restart = 0;; ++restart) {
    Attempt attempt(options, restart, {signals, reaper, out, err});
    const int status = attempt.job().run();
    if (!options.timeline.empty()) write_timelines(options.timeline, attempt.store(), err);
    if (!attempt.job().failed() || attempt.job().was_asked_to_end() || restart == restarts_of_job) return status;
    err << "lockstep run: restart " << restart + 1 << " of " << options.restarts << std::endl;
  }
}

int launch_part(std::ostream& out, std::ostream& err) {
  const Reaper reaper;
  const Signals signals;
  ControlProtocol control;
  const auto part = part_in(control.first(Deadline::after(kToHearWhatToRun)));
  std::error_code failed;
  std::filesystem::current_path(part.folder, failed);
  if (failed) throw IoError(text("host ", part.host, " has no folder ", part.folder, ": ", failed.message()));
  make_folder(part.log_dir);
  const TokenFile token(part.token);
  const auto connect = [&] {
    return Store::connect(part.store, Deadline::after(kForLastWords), {token.access().token, part.trusted_network});
  };
  const auto tell = [&](int rank) { tell_that_it_ended(connect, rank); };
  return JobProcesses(ranks_of(part, token.path()), {.grace_seconds = part.grace_seconds, .restarts = part.restarts},
                      {signals, reaper, out, err, &control, tell})
      .run();
}

}  // namespace lockstep::launch
