#include "base/process.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "base/text.h"
#include "lockstep/base/version.h"

namespace lockstep {

namespace {

// The bound in a file cpu.max, in cores, or memory.max, in bytes; +inf where it sets none or cannot be read.
double bound_in(const std::string& path) {
  std::ifstream file(path);
  double bound = 0, period = 0;
  if (!(file >> bound)) return INFINITY;  // "max" is no number
  return file >> period && period > 0 ? bound / period : bound;
}

// The smallest bound on the way from this process's control group to the root (cgroup v2).
double smallest_bound(const char* file_name) {
  std::ifstream file("/proc/self/cgroup");
  double smallest = INFINITY;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("0::")) continue;
    for (std::string group = line.substr(3);; group.resize(group.rfind('/'))) {
      smallest = std::min(smallest, bound_in("/sys/fs/cgroup" + group + "/" + file_name));
      if (group.empty() || group.find('/') == std::string::npos) break;
    }
  }
  return smallest;
}

int number_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  int number = 0;
  return file >> number ? number : 0;
}

// The K of the entry nodeK in a core's folder.
int memory_node_of(const std::filesystem::path& cpu) {
  constexpr std::string_view kPrefix = "node";
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(cpu, ignored)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(kPrefix)) return std::atoi(name.c_str() + kPrefix.size());
  }
  return 0;
}

}  // namespace

std::vector<int> cpus_by_place(std::vector<int> cpus, const std::string& system) {
  std::map<int, std::array<int, 3>> places;
  for (const int number : cpus) {
    const auto cpu = std::filesystem::path(system) / "cpu" / ("cpu" + std::to_string(number));
    places[number] = {memory_node_of(cpu), number_in(cpu / "topology/physical_package_id"),
                      number_in(cpu / "topology/core_id")};
  }
  std::stable_sort(cpus.begin(), cpus.end(), [&](int a, int b) { return places[a] < places[b]; });
  return cpus;
}

std::string name_of_this_host() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (auto& each : texts) pointers.push_back(each.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return {0};
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

int quota_cpu_count() {
  constexpr double kMost = 1 << 20;
  return static_cast<int>(std::clamp(std::ceil(smallest_bound("cpu.max")), 1.0, kMost));
}

int usable_cpu_count() { return std::min(static_cast<int>(allowed_cpus().size()), quota_cpu_count()); }

namespace {
std::atomic<int> sharing_memory{1};
}  // namespace

void share_memory_among(int processes) { sharing_memory.store(std::max(1, processes), std::memory_order_relaxed); }
int processes_that_share_memory() { return sharing_memory.load(std::memory_order_relaxed); }

std::size_t usable_memory_bytes() {
  const auto machine = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  return static_cast<std::size_t>(std::min(machine, smallest_bound("memory.max")));
}

bool pin_current_thread(std::span<const int> cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0;
}

namespace {

constexpr int kMostFrames = 48, kOwnFrames = 2;  // the handler, and what the system calls it from
constexpr int kToAnswerSeconds = 1;

// The handler of the asked thread writes to this. A late handler finds that another thread is asked, or none.
struct Answer {
  std::atomic<int> asked{0};  // the thread
  std::array<void*, kMostFrames> frames{};
  int count = 0;
  sem_t given{};
};
Answer answer;

void give_frames(int) {
  const int saved = errno;
  int self = static_cast<int>(syscall(SYS_gettid));
  if (answer.asked.compare_exchange_strong(self, 0)) {
    answer.count = backtrace(answer.frames.data(), kMostFrames);
    sem_post(&answer.given);
  }
  errno = saved;
}

std::string name_of_frame(void* frame) {
  Dl_info info{};
  if (dladdr(frame, &info) == 0 || info.dli_fname == nullptr) return text(frame);
  const auto library = std::filesystem::path(info.dli_fname).filename().string();
  const auto offset = static_cast<const char*>(frame) - static_cast<const char*>(info.dli_fbase);
  const auto place = text(library, "+0x", std::hex, offset);
  if (info.dli_sname == nullptr) return place;
  int failed = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &failed),
                                                         &std::free);
  return text(failed == 0 ? name.get() : info.dli_sname, " (", place, ")");
}

std::string frames_of(int thread, int signal) {
  answer.asked = thread;
  if (syscall(SYS_tgkill, getpid(), thread, signal) != 0) return "";
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += kToAnswerSeconds;
  while (sem_timedwait(&answer.given, &until) != 0) {
    if (errno == EINTR) continue;
    int still_asked = thread;
    if (answer.asked.compare_exchange_strong(still_asked, 0)) return "  does not answer\n";
  }  // it is just answering
  std::string lines;
  for (int i = kOwnFrames; i < answer.count; ++i)
    lines += text("  ", name_of_frame(answer.frames[static_cast<std::size_t>(i)]), "\n");
  return lines;
}

}  // namespace

std::string stacks_of_all_threads() {
  static Mutex one_at_a_time;
  MutexLock lock(one_at_a_time);
  void* first = nullptr;
  backtrace(&first, 1);  // the first call allocates memory, which a handler must not
  sem_init(&answer.given, 0, 0);
  const int signal = SIGRTMIN + 7;
  struct sigaction action {};
  action.sa_handler = &give_frames;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
  std::string all;
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", failed)) {
    std::string name;
    std::ifstream(entry.path() / "comm") >> name;
    const auto thread = std::stoi(entry.path().filename().string());
    all += text("thread ", thread, " (", name, ")\n", frames_of(thread, signal));
  }
  // The handler stays: a thread that did not answer may still get its signal, which would end the process.
  return all;
}

namespace {

std::filesystem::path folder_of_this_library() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&find_in_plugin), &info) == 0 || info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

}  // namespace

void* find_in_plugin(const Plugin& plugin, const char* function, std::string& reason) {
  auto library = text("liblockstep_", plugin.name, ".so");
  const auto folder = folder_of_this_library();
  if (!std::filesystem::exists(folder / library)) library += ".0";  // an installation for programs, not for builds
  const auto here = folder / library;
  void* const handle = dlopen(std::filesystem::exists(here) ? here.c_str() : library.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const found = handle == nullptr ? nullptr : dlsym(handle, function);
  if (found == nullptr) {
    reason = text(plugin.needed_for, " need liblockstep_", plugin.name, ".so, which lies in ", folder.string(),
                  " where Lockstep was built with it (-D", plugin.option, "=ON): ", dlerror());
  }
  return found;
}

OpenedLibrary::OpenedLibrary(std::string name, std::span<const char* const> names, const std::string& missing,
                             int options)
    : name_(std::move(name)) {
  std::string reason;
  for (const int loaded : {RTLD_NOLOAD, 0}) {
    for (const char* const file : names) {
      handle_ = dlopen(file, RTLD_NOW | options | loaded);
      if (handle_ != nullptr) return;
      if (loaded == 0) reason += text(reason.empty() ? "" : "; ", dlerror());
    }
  }
  throw InvalidArgument(text(missing, ": ", reason));
}

void* OpenedLibrary::find_or_null(const char* name) const { return dlsym(handle_, name); }

void* OpenedLibrary::address_of(const char* name) const {
  void* const found = find_or_null(name);
  if (found == nullptr) throw InvalidArgument(text(name_, " has no ", name));
  return found;
}

const char* version() { return LOCKSTEP_VERSION; }

}  // namespace lockstep
