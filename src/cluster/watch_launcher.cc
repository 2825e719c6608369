#include "cluster/watch_launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>
#include <thread>

#include "base/file_descriptor.h"
#include "base/log.h"
#include "base/text.h"

namespace lockstep::cluster {
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
