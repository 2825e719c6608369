#include "base/resources.h"
#include "collective/make.h"

namespace lockstep {

// About 10 us with the core to oneself, then 100 us in which others may have it: the rank that is waited for may be one
// of them.
Patience patience_in_memory(int ranks_on_this_host) {
  constexpr int kSpins = 400, kYields = 200;
  return {.spins = ranks_on_this_host <= usable_cpu_count() ? kSpins : 0, .yields = kYields};
}

// About 100 us. With more ranks than cores, sleeping at once gives the core to one that has something to send.
Patience patience_at_sockets(int ranks_on_this_host) {
  constexpr int kSpins = 30;
  return {.spins = ranks_on_this_host <= usable_cpu_count() ? kSpins : 0};
}

}  // namespace lockstep
