// Recursive halving and doubling: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
// in MPICH", Int. J. High Performance Computing Applications 19(1), 2005.
//
// Where the number of ranks is no power of two, the first ranks pair up. The even ones hand their data to the odd ones,
// and get the result at the end.
#include <algorithm>
#include <bit>

#include "collective/message_passing/algorithms.h"

namespace lockstep::collective {

void halving_doubling_all_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count) {
  const int me = team.rank();
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(team.size())));
  const int pairs = team.size() - power;  // the first 2 * pairs ranks are paired
  const auto element = reduction.element();
  const std::span<std::byte> all(data, count * element);

  if (me < 2 * pairs && me % 2 == 0) {
    team.send(me + 1, all);
    team.receive(me + 1, all);
    return;
  }
  if (me < 2 * pairs) team.receive_and_fold(me - 1, reduction, data, count);

  const int mine = me < 2 * pairs ? me / 2 : me - pairs;  // among the `power` ranks that are left
  const auto rank_of = [&](int number) { return number < pairs ? 2 * number + 1 : number + pairs; };
  std::vector<Slice> ranges{{0, count}};  // what this rank still reduces, step by step
  for (int distance = power / 2; distance > 0; distance /= 2) {
    const auto range = ranges.back();
    const auto middle = range.begin + range.count() / 2;
    const bool low = (mine & distance) == 0;
    const Slice kept = low ? Slice{range.begin, middle} : Slice{middle, range.end};
    const Slice given = low ? Slice{middle, range.end} : Slice{range.begin, middle};
    const int other = rank_of(mine ^ distance);
    team.swap_and_fold(other, part_of(data, given, element), other, reduction, data + kept.begin * element,
                       kept.count());
    ranges.push_back(kept);
  }
  for (int distance = 1; distance < power; distance *= 2) {
    const auto had = ranges.back();
    ranges.pop_back();
    const auto whole = ranges.back();
    const Slice lacked = had.begin == whole.begin ? Slice{had.end, whole.end} : Slice{whole.begin, had.begin};
    const int other = rank_of(mine ^ distance);
    team.swap(other, part_of(data, had, element), other, part_of(data, lacked, element));
  }
  if (me < 2 * pairs) team.send(me - 1, all);
}

}  // namespace lockstep::collective
