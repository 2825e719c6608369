#include "collective/message_passing/algorithms.h"

#include <algorithm>
#include <bit>

#include "kernels/reduce.h"

namespace lockstep::collective {

std::byte* Scratch::take(std::size_t bytes) {
  if (bytes > bytes_) {
    memory_.reset(new (std::align_val_t{64}) std::byte[bytes]);
    bytes_ = bytes;
  }
  return memory_.get();
}

Team::Team(transport::Channels& channels, std::vector<int> members, const transport::MessageTag& tag, Deadline deadline,
           const char* operation, Scratch& scratch)
    : channels_(channels),
      members_(std::move(members)),
      tag_(tag),
      deadline_(deadline),
      operation_(operation),
      scratch_(scratch) {
  rank_ = static_cast<int>(std::find(members_.begin(), members_.end(), channels.rank()) - members_.begin());
}

void Team::exchange(std::vector<transport::Outgoing> outgoing, std::vector<transport::Incoming> incoming) {
  for (auto& message : outgoing) {
    message.to = members_[static_cast<std::size_t>(message.to)];
    message.tag = tag_;
  }
  for (auto& message : incoming) {
    message.from = members_[static_cast<std::size_t>(message.from)];
    message.tag = tag_;
  }
  channels_.exchange(outgoing, incoming, deadline_, operation_);
}

void Team::swap(int to, std::span<const std::byte> out, int from, std::span<std::byte> in) {
  exchange({{to, out.data(), out.size(), {}}}, {{from, in.data(), in.size(), nullptr, {}}});
}

void Team::swap_and_fold(int to, std::span<const std::byte> out, int from, const ElementOp& reduction, std::byte* into,
                         std::size_t count) {
  const auto fold = folding(reduction, into);
  exchange({{to, out.data(), out.size(), {}}}, {{from, nullptr, count * reduction.element(), &fold, {}}});
}

void Team::receive_and_fold(int from, const ElementOp& reduction, std::byte* into, std::size_t count) {
  const auto fold = folding(reduction, into);
  exchange({}, {{from, nullptr, count * reduction.element(), &fold, {}}});
}

transport::Consumer folding(const ElementOp& reduction, std::byte* into) {
  return [=](std::size_t at, const std::byte* data, std::size_t bytes) {
    kernels::accumulate(reduction.op, reduction.dtype, into + at, data, bytes / reduction.element());
  };
}

// Direct: every rank sends its buffer to every other rank and reduces by itself: one step, n-1 times the bytes. Star:
// one rank reduces for all (tf.distribute.ReductionToOneDevice).

namespace {

// Receives every rank's buffer and leaves the reduction in `data`. kernels::reduce already divides where the op is
// mean.
void gather_and_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count, bool sends) {
  const auto bytes = count * reduction.element();
  const auto place = (bytes + 63) / 64 * 64;
  const auto n = static_cast<std::size_t>(team.size());
  auto* const others = team.scratch().take(place * n);
  std::vector<transport::Outgoing> outgoing;
  std::vector<transport::Incoming> incoming;
  std::vector<const void*> inputs;
  for (int r = 0; r < team.size(); ++r) {
    auto* const theirs = others + place * static_cast<std::size_t>(r);
    inputs.push_back(r == team.rank() ? data : theirs);
    if (r == team.rank()) continue;
    if (sends) outgoing.push_back({r, data, bytes, {}});
    incoming.push_back({r, theirs, bytes, nullptr, {}});
  }
  team.exchange(std::move(outgoing), std::move(incoming));
  void* const outputs[] = {data};
  kernels::reduce(reduction.op, reduction.dtype, inputs, outputs, count);
}

}  // namespace

void direct_all_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count) {
  gather_and_reduce(team, reduction, data, count, true);
}

void star_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count, int root) {
  if (team.rank() == root) return gather_and_reduce(team, reduction, data, count, false);
  team.send(root, {data, count * reduction.element()});
}

void star_broadcast(Team& team, std::span<std::byte> data, int root) {
  if (team.rank() != root) return team.receive(root, data);
  std::vector<transport::Outgoing> outgoing;
  for (int r = 0; r < team.size(); ++r) {
    if (r != root) outgoing.push_back({r, data.data(), data.size(), {}});
  }
  team.exchange(std::move(outgoing), {});
}

// The dissemination barrier: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel
// Programming 17(1), 1988. After the step of distance d a rank knows that 2d ranks have arrived: itself and those
// below.
void dissemination_barrier(Team& team) {
  const int n = team.size(), me = team.rank();
  for (int distance = 1; distance < n; distance *= 2) {
    team.swap((me + distance) % n, {}, (me + n - distance) % n, {});
  }
}

// Recursive halving and doubling: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
// in MPICH", Int. J. High Performance Computing Applications 19(1), 2005.
//
// Where the number of ranks is no power of two, the first ranks pair up. The even ones hand their data to the odd ones,
// and get the result at the end.
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

// Reduce-scatter by pairwise exchange: Thakur, Rabenseifner and Gropp (2005), section 4.3. In step s every rank sends
// to the rank s above it the slice that the other one reduces. No partial results are sent, so float16 and bfloat16 are
// rounded once.
void pairwise_reduce_scatter(Team& team, const ElementOp& reduction, const std::byte* data,
                             const std::vector<Slice>& slices, std::byte* result) {
  const int n = team.size(), me = team.rank();
  const auto element = reduction.element();
  const auto slice = [&](int rank) { return slices[static_cast<std::size_t>(rank)]; };
  const auto mine = slice(me);
  const auto outgoing = [&](int rank) -> std::span<const std::byte> {
    return {data + slice(rank).begin * element, slice(rank).count() * element};
  };
  if (!kernels::is_half(reduction.dtype)) {
    copy_bytes(result, data + mine.begin * element, mine.count() * element);
    for (int step = 1; step < n; ++step) {
      const int to = (me + step) % n, from = (me + n - step) % n;
      team.swap_and_fold(to, outgoing(to), from, reduction, result, mine.count());
    }
    return;
  }
  auto* const sum = reinterpret_cast<float*>(team.scratch().take(mine.count() * sizeof(float)));
  kernels::widen(reduction.dtype, sum, data + mine.begin * element, mine.count());
  const transport::Consumer fold = [&](std::size_t at, const std::byte* arrived, std::size_t bytes) {
    kernels::accumulate_wide(reduction.op, reduction.dtype, sum + at / element, arrived, bytes / element);
  };
  for (int step = 1; step < n; ++step) {
    const int to = (me + step) % n, from = (me + n - step) % n;
    team.exchange({{to, outgoing(to).data(), outgoing(to).size(), {}}},
                  {{from, nullptr, mine.count() * element, &fold, {}}});
  }
  if (reduction.op == ReduceOp::mean) kernels::divide(DType::float32, sum, static_cast<std::size_t>(n), mine.count());
  kernels::narrow(reduction.dtype, result, sum, mine.count());
}

// The ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel and
// Distributed Computing 69(2), 2009.
//
// In every step each rank sends one slice to the next rank and accumulates one from the previous rank. A slice that has
// gone round the ring is complete at the rank with its number.
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

// Binomial trees: Thakur, Rabenseifner and Gropp (2005), sections 4.4 and 4.5; the broadcast is the reduction
// backwards.
//
// Ranks are numbered from the root. In the step of distance d every rank whose number is an odd multiple of d sends its
// buffer to the rank d below it.
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
