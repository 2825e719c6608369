// The ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel and
// Distributed Computing 69(2), 2009.
//
// In every step each rank sends one slice to the next rank and accumulates one from the previous rank. A slice that has
// gone round the ring is complete at the rank with its number.
#include "collective/message_passing/algorithms.h"

namespace lockstep::collective {

void ring_reduce_scatter(Team& team, const ElementOp& reduction, std::byte* data, const std::vector<Slice>& slices) {
  const int n = team.size(), me = team.rank();
  const auto slice = [&](int number) { return slices[static_cast<std::size_t>((number % n + n) % n)]; };
  for (int step = 1; step < n; ++step) {
    const auto sent = slice(me - step), folded = slice(me - step - 1);
    team.swap_and_fold((me + 1) % n, part_of(data, sent, reduction.element()), (me + n - 1) % n, reduction,
                       data + folded.begin * reduction.element(), folded.count());
  }
}

void ring_all_gather(Team& team, std::size_t element, std::byte* data, const std::vector<Slice>& slices) {
  const int n = team.size(), me = team.rank();
  const auto slice = [&](int number) { return slices[static_cast<std::size_t>((number % n + n) % n)]; };
  for (int step = 0; step + 1 < n; ++step) {
    team.swap((me + 1) % n, part_of(data, slice(me - step), element), (me + n - 1) % n,
              part_of(data, slice(me - step - 1), element));
  }
}

}  // namespace lockstep::collective
