#include "cluster/cpu_partition.h"

#include <algorithm>
#include <sstream>

#include "base/mutex.h"
#include "base/process.h"
#include "base/text.h"

namespace lockstep::cluster {
namespace {

// The cores that this process was allowed to use when it first asked, and those that it uses now.
struct Given {
  const std::vector<int> all_cpus = allowed_cpus();
  const int count = usable_cpu_count();  // less than the number of all_cpus where the CPU quota is smaller
  Mutex mutex;
  std::vector<int> cpus LOCKSTEP_GUARDED_BY(mutex) = all_cpus;
  int usable LOCKSTEP_GUARDED_BY(mutex) = count;
};

std::function<void(int)>& act_after_partition() {
  static std::function<void(int)> act = [](int) {};
  return act;
}

Given& given() {
  static Given cpus;
  return cpus;
}

}  // namespace

std::vector<int> given_cpus() {
  MutexLock lock(given().mutex);
  return given().cpus;
}

int kept_cpu_count() {
  MutexLock lock(given().mutex);
  return given().usable;
}

int CpuPartition::usable_cpu_count() const {
  if (size == 1) return kept_cpu_count();
  return own_cores ? given().count : std::max(1, given().count / size);
}

std::vector<int> CpuPartition::cpus() const {
  if (size == 1) return cpus_by_place(given_cpus());
  const auto all = cpus_by_place(given().all_cpus);
  const auto count = static_cast<int>(all.size());
  if (count < size || own_cores) return all;
  return {all.begin() + count * rank / size, all.begin() + count * (rank + 1) / size};
}

void keep_to_partition(const CpuPartition& partition) {
  const auto cpus = partition.cpus();
  const int count = partition.usable_cpu_count();
  pin_current_thread(cpus);
  share_memory_among(partition.size);
  {
    MutexLock lock(given().mutex);
    given().cpus = cpus;
    given().usable = count;
  }
  act_after_partition()(count);
}

void after_partition(std::function<void(int cores)> act) { act_after_partition() = std::move(act); }

bool has_own_cores(const World& world, Bootstrap& members, Deadline deadline) {
  const auto& mine = given().all_cpus;
  const auto all = members.all_gather(text(world.host, "\n", join(mine, " ")), deadline);
  if (world.local_size == 1) return false;
  for (int r = 0; r < world.size; ++r) {
    std::istringstream words(all[static_cast<std::size_t>(r)]);
    std::string host;
    std::getline(words, host);
    if (r == world.rank || host != world.host) continue;
    for (int cpu = 0; words >> cpu;) {
      if (std::find(mine.begin(), mine.end(), cpu) != mine.end()) return false;
    }
  }
  return true;
}

}  // namespace lockstep::cluster
