#include <algorithm>
#include <set>
#include <sstream>

#include "base/resources.h"
#include "base/text.h"
#include "cluster/bootstrap.h"
#include "collective/make.h"

namespace lockstep::collective {

int cores_of_host(cluster::Bootstrap& members, const std::vector<std::string>& hosts, Deadline deadline) {
  const auto all = members.all_gather(text(quota_cpu_count(), " ", join(allowed_cpus(), " ")), deadline);
  std::set<int> cpus;
  int quota = 0;  // ranks of one host may be in control groups with different quotas: the largest counts
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (hosts[r] != hosts[static_cast<std::size_t>(members.rank())]) continue;
    std::istringstream words(all[r]);
    int theirs = 0;
    words >> theirs;
    quota = std::max(quota, theirs);
    for (int cpu = 0; words >> cpu;) cpus.insert(cpu);
  }
  return std::min(static_cast<int>(cpus.size()), quota);
}

// About 10 us of spinning where each rank has a core, then 100 us of yielding: the awaited rank may need this core.
transport::SpinThenBlock spin_in_memory(int ranks, int cores) {
  constexpr int kSpins = 400, kYields = 200;
  return {.spins = ranks <= cores ? kSpins : 0, .yields = kYields};
}

// About 100 us. With more ranks than cores a rank blocks at once, so that its core is free for one with data to send.
transport::SpinThenBlock spin_at_sockets(int ranks, int cores) {
  constexpr int kSpins = 30;
  return {.spins = ranks <= cores ? kSpins : 0};
}

}  // namespace lockstep::collective
