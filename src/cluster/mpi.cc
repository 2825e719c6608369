#include "cluster/resolvers.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <span>
#include <string>
#include <thread>

#include "base/file.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::cluster {

// Reads the variables of Open MPI's mpirun and MPICH's.

namespace {

constexpr int kMostDescriptors = 1 << 20;
constexpr std::chrono::seconds kForOwnName(10);

// The loopback address where all ranks are on one host.
std::string host_of_rank_0(const World& world, const Environment& environment) {
  if (world.local_size == world.size) return "127.0.0.1";
  if (environment("MASTER_ADDR") != nullptr) return text_of(environment, "MASTER_ADDR");
  throw ClusterError(
      "Open MPI does not tell where rank 0 runs, and the ranks are on several hosts; name its host: mpirun -x "
      "MASTER_ADDR=host");
}

std::string name_of_host(const World& world, const Environment& environment, const char* variable) {
  return world.local_size == world.size ? "localhost" : text_of(environment, variable);
}

}  // namespace

std::optional<Cluster> from_open_mpi(const Environment& environment) {
  if (environment("OMPI_COMM_WORLD_RANK") == nullptr) return std::nullopt;
  const Names names{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
                    "OMPI_COMM_WORLD_LOCAL_RANK"};
  Cluster cluster{.world = world_of(environment, names), .source = "Open MPI"};
  auto& world = cluster.world;
  if (world.size == 1) return cluster;
  world.host = name_of_host(world, environment, "PMIX_HOSTNAME");
  cluster.store = host_of_rank_0(world, environment);
  cluster.job = "Open MPI " + text_of(environment, "PMIX_NAMESPACE");
  cluster.holds_store = world.rank == 0;
  return cluster;
}

std::optional<Cluster> from_mpich(const Environment& environment) {
  if (environment("PMI_RANK") == nullptr || environment("MPI_LOCALNRANKS") == nullptr) return std::nullopt;
  const Names names{"PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"};
  Cluster cluster{.world = world_of(environment, names), .source = "MPICH"};
  auto& world = cluster.world;
  if (world.size == 1) return cluster;
  world.host = name_of_host(world, environment, "MPIR_CVAR_CH3_INTERFACE_HOSTNAME");
  pmi_descriptor(environment);  // throws where it is none
  cluster.holds_store = world.rank == 0;
  if (cluster.holds_store) {
    cluster.store = world.local_size == world.size
                        ? "127.0.0.1:0"
                        : transport::address_towards(world.host, Deadline::after(kForOwnName)) + ":0";
  }
  return cluster;
}

int pmi_descriptor(const Environment& environment) { return number_of(environment, "PMI_FD", 0, kMostDescriptors); }

namespace {

constexpr std::size_t kLongestLine = 4096;
constexpr const char* kKey = "lockstep-store";

// Asks the process manager, by PMI-1: each request gets one answer, both a line of name=value.
std::string ask(const FileDescriptor& manager, const std::string& command, const std::string& expected,
                Deadline deadline) {
  const auto line = "cmd=" + command + "\n";
  transport::write_all(manager, std::as_bytes(std::span(line)), deadline);
  std::string answer;
  for (char c = 0; (c = transport::read_value<char>(manager, deadline)) != '\n';) {
    if (answer.size() == kLongestLine) throw ClusterError("PMI: the process manager's answer has no end");
    answer.push_back(c);
  }
  const bool well = answer.find("rc=") == std::string::npos || answer.find("rc=0") != std::string::npos;
  if (answer.find("cmd=" + expected) == std::string::npos || !well) {
    throw ClusterError(text("PMI: the process manager answers \"", answer, "\" to \"", command, "\""));
  }
  return answer;
}

std::string value_in(const std::string& answer, const std::string& name) {
  const auto at = answer.find(name + "=");
  if (at == std::string::npos) throw ClusterError(text("PMI: there is no ", name, " in \"", answer, "\""));
  const auto begin = at + name.size() + 1;
  return answer.substr(begin, answer.find(' ', begin) - begin);
}

Mutex manager_mutex;
FileDescriptor manager LOCKSTEP_GUARDED_BY(manager_mutex);  // not open before the first call
std::optional<std::string> shared LOCKSTEP_GUARDED_BY(manager_mutex);

// An MPI library in this process, the program's or ours, speaks to the process manager too, and says goodbye last.
bool mpi_is_initialized() {
  using Initialized = int(int* flag);
  const auto initialized = reinterpret_cast<Initialized*>(dlsym(RTLD_DEFAULT, "MPI_Initialized"));
  int flag = 0;
  if (initialized != nullptr) initialized(&flag);
  return flag != 0;
}

void say_goodbye() {
  if (mpi_is_initialized()) return;
  try {
    MutexLock lock(manager_mutex);
    ask(manager, "finalize", "finalize_ack", Deadline::after(std::chrono::seconds(1)));
  } catch (const Error&) {
    // The process manager is gone.
  }
}

}  // namespace

std::string share_through_pmi(int fd, bool is_rank_0, const std::string& mine, Deadline deadline) {
  MutexLock lock(manager_mutex);
  if (shared) return *shared;
  manager = FileDescriptor(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!manager.open()) throw ClusterError(text("PMI_FD is ", fd, ", which is no open descriptor"));
  ask(manager, "init pmi_version=1 pmi_subversion=1", "response_to_init", deadline);
  std::atexit(&say_goodbye);
  const auto space = value_in(ask(manager, "get_my_kvsname", "my_kvsname", deadline), "kvsname");
  const auto place = text("kvsname=", space, " key=", kKey);
  if (is_rank_0) ask(manager, text("put ", place, " value=", mine), "put_result", deadline);
  ask(manager, "barrier_in", "barrier_out", deadline);
  return *(shared = value_in(ask(manager, "get " + place, "get_result", deadline), "value"));
}

namespace {

constexpr std::chrono::seconds kToSave(10);

std::string name_of_process(pid_t process) {
  std::string name;
  std::ifstream file(text("/proc/", process, "/comm"));
  std::getline(file, name);
  return name;
}

pid_t parent_of(pid_t process) {
  std::ifstream file(text("/proc/", process, "/status"));
  for (std::string word; file >> word;) {
    pid_t parent = 0;
    if (word == "PPid:" && file >> parent) return parent;
  }
  return 0;
}

// The nearest ancestor that is an mpirun, or its daemon on this host: a shell may stand between.
pid_t launcher() {
  const auto names = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy", "mpiexec.hydra"};
  for (pid_t process = getppid(); process > 1; process = parent_of(process)) {
    if (std::find(names.begin(), names.end(), name_of_process(process)) != names.end()) return process;
  }
  return 0;
}

void wait_and_end(const FileDescriptor& pidfd) {
  pollfd ended{pidfd.get(), POLLIN, 0};
  while (poll(&ended, 1, -1) != 1) {
  }
  log_warning("the mpirun that started this process is gone: it ends");
  kill(getpid(), SIGTERM);
  std::this_thread::sleep_for(kToSave);
  kill(getpid(), SIGKILL);
}

}  // namespace

void end_with_launcher() {
  static std::atomic<bool> called{false};
  if (called.exchange(true)) return;
  const pid_t process = launcher();
  if (process == 0) return;
  FileDescriptor pidfd(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
  if (!pidfd.open()) return;
  std::thread([pidfd = std::move(pidfd)] { wait_and_end(pidfd); }).detach();
}

}  // namespace lockstep::cluster
