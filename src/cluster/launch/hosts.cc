#include "cluster/launch/hosts.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include "base/file.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/process.h"
#include "base/text.h"
#include "cluster/launch/launcher_process.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

extern char** environ;

namespace lockstep::launch {
namespace {

constexpr int kMostSlots = 4096;
constexpr std::size_t kLongestName = 255;

InvalidArgument bad(const std::string& where, const std::string& entry, const std::string& problem) {
  return InvalidArgument(text(where, ": \"", entry.substr(0, kLongestName), "\" ", problem));
}

int slots_in(const std::string& digits, const std::string& where, const std::string& entry) {
  const auto slots = whole_number<int>(digits);
  if (slots && *slots >= 1 && *slots <= kMostSlots) return *slots;
  throw bad(where, entry, text("has \"", digits, "\" slots; it must be a number from 1 to ", kMostSlots));
}

// Throws for a name that ssh would take for an option, or a shell for more than one word.
std::string checked_name(const std::string& name, const std::string& where, const std::string& entry) {
  const auto good = [](unsigned char c) {
    return std::isalnum(c) || std::string_view("._-@:%").find(c) != std::string_view::npos;
  };
  if (name.empty() || name.size() > kLongestName || name.front() == '-' ||
      !std::all_of(name.begin(), name.end(), good)) {
    throw bad(where, entry, "has no host's name or address");
  }
  return name;
}

// "host", "host:4", "[v6]", "[v6]:4".
HostSlots parse_entry(const std::string& entry, const std::string& where) {
  std::string name = entry, slots;
  const auto bracket = entry.find(']');
  if (!entry.empty() && entry.front() == '[' && bracket != std::string::npos) {
    name = entry.substr(1, bracket - 1);
    const auto rest = entry.substr(bracket + 1);
    if (!rest.empty() && rest.front() != ':') throw bad(where, entry, "goes on after its address");
    if (!rest.empty()) slots = rest.substr(1);
    if (rest == ":") throw bad(where, entry, "has no number after its colon");
  } else if (const auto colon = entry.find(':'); colon != std::string::npos) {
    if (entry.find(':', colon + 1) != std::string::npos)
      throw bad(where, entry, "has two colons; put an address of IPv6 in brackets");
    name = entry.substr(0, colon);
    slots = entry.substr(colon + 1);
    if (slots.empty()) throw bad(where, entry, "has no number after its colon");
  }
  return {checked_name(name, where, entry), slots.empty() ? 1 : slots_in(slots, where, entry)};
}

void require_distinct(const std::vector<HostSlots>& hosts, const std::string& where) {
  std::set<std::string> seen;
  for (const auto& host : hosts) {
    if (!seen.insert(host.name).second) throw InvalidArgument(text(where, ": ", host.name, " is named twice"));
  }
}

constexpr std::chrono::seconds kToAnswer(10), kBetweenRuns(1);
constexpr std::chrono::milliseconds kBetweenChecks(50);
constexpr std::size_t kMostOutput = 1 << 20;
constexpr int kMostDoublings = 10;

// In a process group of its own, with the default signal mask. Its standard output is `out`.
pid_t start(const std::string& command, const FileDescriptor& out) {
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&files, out.get(), STDOUT_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  std::string shell = "/bin/sh", option = "-c", line = command;
  char* arguments[] = {shell.data(), option.data(), line.data(), nullptr};
  pid_t process = 0;
  const int error = posix_spawn(&process, shell.c_str(), &files, &attributes, arguments, environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) throw ClusterError(text("cannot be started: ", std::strerror(error)));
  return process;
}

// Returns what it prints until it ends. Throws ClusterError, also where this is to stop.
std::string output_of(const std::string& command, const std::stop_token& stop) {
  Pipe pipe;
  const pid_t process = start(command, pipe.in);
  pipe.in = FileDescriptor();
  std::string printed, problem;
  const auto deadline = Deadline::after(kToAnswer);
  for (char bytes[4096];;) {
    if (stop.stop_requested() || deadline.passed()) {
      problem = text("did not end within ", kToAnswer.count(), " s");
      break;
    }
    if (!transport::wait_for_events(pipe.out.get(), POLLIN, Deadline::after(kBetweenChecks))) continue;
    const auto count = read(pipe.out.get(), bytes, sizeof bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    printed.append(bytes, static_cast<std::size_t>(count));
    if (printed.size() > kMostOutput) {
      problem = text("prints more than ", kMostOutput, " bytes");
      break;
    }
  }
  siginfo_t ended{};
  while (waitid(P_PID, static_cast<id_t>(process), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == 0) {
    if (problem.empty() && deadline.passed()) problem = text("did not end within ", kToAnswer.count(), " s");
    if (!problem.empty()) kill(-process, SIGKILL);
    usleep(1000);
  }
  kill(-process, SIGKILL);  // processes that it left, while its process id is still reserved
  int status = 0;
  waitpid(process, &status, 0);
  if (problem.empty() && WIFEXITED(status) && WEXITSTATUS(status) != 0)
    problem = text("ended with status ", WEXITSTATUS(status));
  if (!problem.empty()) throw ClusterError(problem);
  return printed;
}

}  // namespace

std::vector<HostSlots> parse_hosts(const std::string& list) {
  std::vector<HostSlots> hosts;
  std::istringstream entries(list);
  for (std::string entry; std::getline(entries, entry, ',');) hosts.push_back(parse_entry(entry, "-H"));
  if (hosts.empty() || list.back() == ',') throw bad("-H", list, "ends without a host");
  require_distinct(hosts, "-H");
  return hosts;
}

std::vector<HostSlots> parse_hostfile(const std::string& contents, const std::string& name) {
  std::vector<HostSlots> hosts;
  std::istringstream lines(contents);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    const auto where = text(name, ", line ", ++number);
    std::istringstream words(line.substr(0, line.find('#')));
    std::string entry, slots, more;
    if (!(words >> entry)) continue;
    auto host = parse_entry(entry, where);
    if (words >> slots) {
      constexpr std::string_view kSlots = "slots=";
      if (!slots.starts_with(kSlots) || words >> more) throw bad(where, line, "is not: host slots=4");
      host.slots = slots_in(slots.substr(kSlots.size()), where, line);
    }
    hosts.push_back(host);
  }
  if (hosts.empty()) throw InvalidArgument(text(name, " names no host"));
  require_distinct(hosts, name);
  return hosts;
}

std::vector<HostSlots> read_hostfile(const std::string& path) {
  try {
    return parse_hostfile(read_small_file(path), path);
  } catch (const IoError& error) {
    throw IoError(text("cannot read the hostfile ", path, ": ", error.what()));
  }
}

int slots_of(const std::vector<HostSlots>& hosts) {
  return std::accumulate(hosts.begin(), hosts.end(), 0, [](int sum, const auto& host) { return sum + host.slots; });
}

std::vector<HostSlots> fill(std::vector<HostSlots> hosts, std::optional<int> processes) {
  if (hosts.empty()) return hosts;
  const int slots = slots_of(hosts);
  if (processes.value_or(0) > slots) {
    throw InvalidArgument(text("-n is ", *processes, "; the hosts have ", slots, " slots"));
  }
  int left = processes.value_or(slots);
  for (auto& host : hosts) {
    host.slots = std::min(host.slots, left);
    left -= host.slots;
  }
  std::erase_if(hosts, [](const HostSlots& host) { return host.slots == 0; });
  return hosts;
}

std::pair<int, int> parse_nodes(const std::string& range) {
  const auto colon = range.find(':');
  const auto fewest = whole_number<int>(range.substr(0, colon));
  const auto most = colon == std::string::npos ? fewest : whole_number<int>(range.substr(colon + 1));
  if (fewest && most && *fewest >= 1 && *most >= *fewest) return {*fewest, *most};
  throw InvalidArgument(text("lockstep run: --nnodes is \"", range,
                             "\"; it must be a number of nodes, as 4, or the fewest and the most, as 1:4"));
}

bool is_this_host(const std::string& name) { return transport::is_loopback(name) || name == name_of_this_host(); }

HostDiscovery::HostDiscovery(std::string command, double blacklist_seconds)
    : command_(std::move(command)),
      hosts_(ask({})),
      failed_(blacklist_seconds),
      thread_([this](const std::stop_token& stop) {
        while (!stop_requested_by(Deadline::after(kBetweenRuns), stop)) ask_again(stop);
      }) {}

std::vector<HostSlots> HostDiscovery::hosts() {
  MutexLock lock(mutex_);
  return hosts_;
}

std::vector<HostSlots> HostDiscovery::usable_hosts() {
  auto usable = hosts();
  std::erase_if(usable, [this](const HostSlots& host) { return failed_.has(host.name); });
  return usable;
}

std::vector<HostSlots> HostDiscovery::ask(const std::stop_token& stop) const {
  const auto name = text("--host-discovery ", command_);
  std::string printed;
  try {
    printed = output_of(command_, stop);
  } catch (const ClusterError& error) {
    throw ClusterError(text("lockstep run: ", name, ": ", error.what()));
  }
  return parse_hostfile(printed, name);
}

void HostDiscovery::ask_again(const std::stop_token& stop) {
  std::string problem;
  try {
    auto hosts = ask(stop);
    MutexLock lock(mutex_);
    hosts_ = std::move(hosts);
  } catch (const Error& error) {
    problem = error.what();
  }
  if (stop.stop_requested()) return;
  if (!problem.empty() && problem != problem_) log_warning(problem + "; the hosts stay as they are");
  problem_ = problem;
}

double Blacklist::add(const std::string& host) {
  auto& entry = entries_[host];
  const double seconds = seconds_ * (1 << std::min(entry.failures++, kMostDoublings));
  entry.until = Deadline::after(std::chrono::duration<double>(seconds));
  return seconds;
}

bool Blacklist::has(const std::string& host) const {
  const auto found = entries_.find(host);
  return found != entries_.end() && !found->second.until.passed();
}

}  // namespace lockstep::launch
