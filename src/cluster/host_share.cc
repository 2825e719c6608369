#include "cluster/host_share.h"

#include <algorithm>
#include <sstream>

#include "base/mutex.h"
#include "base/resources.h"
#include "base/text.h"

namespace lockstep {
namespace {

struct Given {
  Mutex mutex;
  std::vector<int> cpus LOCKSTEP_GUARDED_BY(mutex) = allowed_cpus();
  int count LOCKSTEP_GUARDED_BY(mutex) = usable_cpu_count();  // fewer than cpus where several processes share them
};
Given& given() {
  static Given cpus;
  return cpus;
}

}  // namespace

std::vector<int> given_cpus() {
  MutexLock lock(given().mutex);
  return given().cpus;
}

int HostShare::usable_cpu_count() const {
  MutexLock lock(given().mutex);
  return own_cores ? given().count : std::max(1, given().count / size);
}

std::vector<int> HostShare::cpus() const {
  const auto all = cpus_by_place(given_cpus());
  const auto count = static_cast<int>(all.size());
  if (count < size || own_cores) return all;
  return {all.begin() + count * rank / size, all.begin() + count * (rank + 1) / size};
}

void keep_to_share(const HostShare& share) {
  const auto cpus = share.cpus();
  const int count = share.usable_cpu_count();
  pin_current_thread(cpus);
  MutexLock lock(given().mutex);
  given().cpus = cpus;
  given().count = count;
}

bool has_own_cores(const World& world, const Store& store, Deadline deadline) {
  if (world.local_size == 1) return false;
  std::vector<std::string> keys;
  for (int r = 0; r < world.size; ++r) keys.push_back(text("cores of rank ", r));
  const auto mine = given_cpus();
  store.set(keys[static_cast<std::size_t>(world.rank)], text(world.host, "\n", join(mine, " ")), deadline);
  const auto all = store.get(keys, deadline);
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

}  // namespace lockstep
