#include <algorithm>
#include <set>
#include <sstream>

#include "base/resources.h"
#include "base/text.h"
#include "cluster/bootstrap.h"
#include "collective/make.h"

namespace lockstep::collective {

int cores_of_host(cluster::Bootstrap& members, const std::vector<std::string>& hosts, Deadline deadline) {
  const auto all = members.all_gather(text(paid_cpu_count(), " ", join(allowed_cpus(), " ")), deadline);
  std::set<int> cpus;
  int paid = 0;  // ranks of one host may be in different control groups: the largest is no less than any pays for
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (hosts[r] != hosts[static_cast<std::size_t>(members.rank())]) continue;
    std::istringstream words(all[r]);
    int theirs = 0;
    words >> theirs;
    paid = std::max(paid, theirs);
    for (int cpu = 0; words >> cpu;) cpus.insert(cpu);
  }
  return std::min(static_cast<int>(cpus.size()), paid);
}

// About 10 us with the core to oneself, then 100 us in which others may have it: the rank that is waited for may be one
// of them.
transport::SpinThenBlock spin_in_memory(int ranks, int cores) {
  constexpr int kSpins = 400, kYields = 200;
  return {.spins = ranks <= cores ? kSpins : 0, .yields = kYields};
}

// About 100 us. With more ranks than cores, sleeping at once gives the core to one that has something to send.
transport::SpinThenBlock spin_at_sockets(int ranks, int cores) {
  constexpr int kSpins = 30;
  return {.spins = ranks <= cores ? kSpins : 0};
}

}  // namespace lockstep::collective
