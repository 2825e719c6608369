#include "base/resources.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace lockstep {
namespace {

// The cores that a cpu.max file allows; +inf when it sets no bound or cannot be read.
double quota_of(const std::string& cpu_max_path) {
  std::ifstream file(cpu_max_path);
  double quota = 0, period = 0;
  return file >> quota >> period && period > 0 ? quota / period : INFINITY;  // "max" is no number
}

// The bound in a memory.max file; +inf when it sets none or cannot be read.
double memory_bound_of(const std::string& memory_max_path) {
  std::ifstream file(memory_max_path);
  double bound = 0;
  return file >> bound ? bound : INFINITY;
}

// The smallest bound on the way from this process's control group to the root (cgroup v2), each read by `bound_of`.
double smallest_bound(const char* file_name, double (*bound_of)(const std::string& path)) {
  std::ifstream file("/proc/self/cgroup");
  double smallest = INFINITY;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("0::")) continue;
    for (std::string group = line.substr(3);; group.resize(group.rfind('/'))) {
      smallest = std::min(smallest, bound_of("/sys/fs/cgroup" + group + "/" + file_name));
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
  return static_cast<int>(std::clamp(std::ceil(smallest_bound("cpu.max", &quota_of)), 1.0, kMost));
}

int usable_cpu_count() { return std::min(static_cast<int>(allowed_cpus().size()), quota_cpu_count()); }

namespace {
std::atomic<int> sharing_memory{1};
}  // namespace

void share_memory_among(int processes) { sharing_memory.store(std::max(1, processes), std::memory_order_relaxed); }
int processes_that_share_memory() { return sharing_memory.load(std::memory_order_relaxed); }

std::size_t usable_memory_bytes() {
  const auto machine = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  return static_cast<std::size_t>(std::min(machine, smallest_bound("memory.max", &memory_bound_of)));
}

bool pin_current_thread(std::span<const int> cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0;
}

}  // namespace lockstep
