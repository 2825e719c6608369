// Binomial trees: Thakur, Rabenseifner and Gropp (2005), sections 4.4 and 4.5; the broadcast is the reduction
// backwards.
//
// Ranks are numbered from the root. In the step of distance d every rank whose number is an odd multiple of d sends its
// buffer to the rank d below it.
#include "collective/message_passing/algorithms.h"

namespace lockstep::collective {

void tree_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count, int root) {
  const int n = team.size(), number = (team.rank() - root + n) % n;
  for (int distance = 1; distance < n; distance *= 2) {
    if (number % (2 * distance) == distance) {
      team.send((number - distance + root) % n, {data, count * reduction.element()});
      return;
    }
    if (number + distance < n) team.receive_and_fold((number + distance + root) % n, reduction, data, count);
  }
}

void tree_broadcast(Team& team, std::span<std::byte> data, int root) {
  const int n = team.size(), number = (team.rank() - root + n) % n;
  int distance = 1;
  while (distance < n && number % (2 * distance) == 0) distance *= 2;
  if (number != 0) team.receive((number - distance + root) % n, data);
  for (distance /= 2; distance > 0; distance /= 2) {
    if (number + distance < n) team.send((number + distance + root) % n, data);
  }
}

}  // namespace lockstep::collective
