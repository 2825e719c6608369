// The dissemination barrier: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel
// Programming 17(1), 1988. After the step of distance d a rank knows that 2d ranks have arrived: itself and those
// below.
#include "collective/message_passing/algorithms.h"

namespace lockstep::collective {

void dissemination_barrier(Team& team) {
  const int n = team.size(), me = team.rank();
  for (int distance = 1; distance < n; distance *= 2) {
    team.swap((me + distance) % n, {}, (me + n - distance) % n, {});
  }
}

}  // namespace lockstep::collective
