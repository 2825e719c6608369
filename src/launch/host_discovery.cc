#include "launch/host_discovery.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/file_descriptor.h"
#include "base/log.h"
#include "base/stop.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

extern char** environ;

namespace lockstep::launch {
namespace {

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

// What it prints until it ends. Throws ClusterError, also where this is to stop.
std::string output_of(const std::string& command, const std::stop_token& stop) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw ClusterError(text("cannot make a pipe: ", std::strerror(errno)));
  const FileDescriptor out(ends[0]);
  FileDescriptor in(ends[1]);
  const pid_t process = start(command, in);
  in = FileDescriptor();
  std::string printed, problem;
  const auto deadline = Deadline::after(kToAnswer);
  for (char bytes[4096];;) {
    if (stop.stop_requested() || deadline.passed()) {
      problem = text("did not end within ", kToAnswer.count(), " s");
      break;
    }
    if (!transport::wait_for_events(out.get(), POLLIN, Deadline::after(kBetweenChecks))) continue;
    const auto count = read(out.get(), bytes, sizeof bytes);
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
  kill(-process, SIGKILL);  // what it started and left behind, while its process id is still reserved
  int status = 0;
  waitpid(process, &status, 0);
  if (problem.empty() && WIFEXITED(status) && WEXITSTATUS(status) != 0)
    problem = text("ended with status ", WEXITSTATUS(status));
  if (!problem.empty()) throw ClusterError(problem);
  return printed;
}

}  // namespace

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
