#include "collective/message_passing/algorithms.h"

#include <algorithm>

#include "kernels/reduce.h"

namespace lockstep::collective {
namespace {

using Kind = Call::Kind;

// Up to this many bytes, times the other ranks, the direct algorithm is the fastest.
constexpr std::size_t kDirectBytes = 64 * 1024;
// Sending a slice of so many bytes takes longer than the latency of a step.
constexpr std::size_t kRingSliceBytes = 64 * 1024;

// The largest slice: when it is gathered it is still in a cache from its reduction.
constexpr std::size_t kSegmentSlice = 512 * 1024;

std::vector<Slice> even_slices(std::size_t count, DType dtype, int size) {
  std::vector<Slice> slices;
  for (int r = 0; r < size; ++r) slices.push_back(even_slice(count, dtype, r, size));
  return slices;
}

std::vector<Slice> shares_of(const Call& call, std::size_t each, int size) {
  std::vector<Slice> slices;
  for (int r = 0; r < size; ++r) slices.push_back(share_of(call.counts, each, r));
  return slices;
}

Implementation chosen_for(const Call& call, int size, Implementation wanted) {
  if (wanted != Implementation::automatic) return wanted;
  const auto bytes = call.input.bytes();
  const auto ranks = static_cast<std::size_t>(size);
  if (bytes * (ranks - 1) <= kDirectBytes) return Implementation::direct;
  if (kernels::is_half(call.input.dtype)) return Implementation::pairwise;
  return bytes / ranks >= kRingSliceBytes || size == 2 ? Implementation::ring : Implementation::halving_doubling;
}

void divide_if_mean(const ElementOp& reduction, std::byte* data, const Slice& slice, int size) {
  if (reduction.op != ReduceOp::mean) return;
  kernels::divide(reduction.dtype, data + slice.begin * reduction.element(), static_cast<std::size_t>(size),
                  slice.count());
}

// Reduces each slice, by the ring or at its owner, and gathers the slices.
void all_reduce_in_slices(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count, bool pairwise) {
  const auto slices = even_slices(count, reduction.dtype, team.size());
  const auto mine = slices[static_cast<std::size_t>(team.rank())];
  if (pairwise) {
    pairwise_reduce_scatter(team, reduction, data, slices, data + mine.begin * reduction.element());
  } else {
    ring_reduce_scatter(team, reduction, data, slices);
  }
  if (!pairwise || !kernels::is_half(reduction.dtype)) divide_if_mean(reduction, data, mine, team.size());
  ring_all_gather(team, reduction.element(), data, slices);
}

void all_reduce(Team& team, const Call& call, Implementation implementation) {
  const ElementOp reduction{call.op, call.input.dtype};
  auto* const data = bytes_of(call.output);
  const auto count = call.output.count;
  switch (implementation) {
    case Implementation::direct: return direct_all_reduce(team, reduction, data, count);
    case Implementation::halving_doubling:
      halving_doubling_all_reduce(team, reduction, data, count);
      return divide_if_mean(reduction, data, {0, count}, team.size());
    case Implementation::tree:
      tree_reduce(team, reduction, data, count, 0);
      tree_broadcast(team, {data, call.output.bytes()}, 0);
      return divide_if_mean(reduction, data, {0, count}, team.size());
    case Implementation::reduction_to_one_device:
      star_reduce(team, reduction, data, count, 0);
      return star_broadcast(team, {data, call.output.bytes()}, 0);
    default: break;
  }
  const std::size_t step = kSegmentSlice / reduction.element() * static_cast<std::size_t>(team.size());
  std::size_t begin = 0;
  do {  // runs for an empty buffer too: the messages show whether the others make the same call
    all_reduce_in_slices(team, reduction, data + begin * reduction.element(), std::min(step, count - begin),
                         implementation == Implementation::pairwise);
    begin += step;
  } while (begin < count);
}

// Reduces each slice at its owner; `reduce` then collects the slices at the root.
void reduce_scatter(Team& team, const Call& call, const std::vector<Slice>& slices, std::byte* result) {
  const ElementOp reduction{call.op, call.input.dtype};
  const auto mine = slices[static_cast<std::size_t>(team.rank())];
  pairwise_reduce_scatter(team, reduction, bytes_of(call.input), slices, result);
  if (!kernels::is_half(reduction.dtype)) divide_if_mean(reduction, result, {0, mine.count()}, team.size());
}

void reduce(Team& team, const Call& call, Implementation implementation) {
  const ElementOp reduction{call.op, call.input.dtype};
  const auto bytes = call.input.bytes();
  const bool root = team.rank() == call.peer;
  if (implementation == Implementation::tree ||
      (implementation == Implementation::automatic && bytes <= kDirectBytes && !kernels::is_half(reduction.dtype))) {
    std::vector<std::byte> mine(bytes_of(call.input), bytes_of(call.input) + bytes);
    tree_reduce(team, reduction, mine.data(), call.input.count, call.peer);
    if (!root) return;
    divide_if_mean(reduction, mine.data(), {0, call.input.count}, team.size());
    return copy_bytes(bytes_of(call.output), mine.data(), bytes);
  }
  const auto slices = even_slices(call.input.count, reduction.dtype, team.size());
  const auto slice_bytes = [&](int r) { return slices[static_cast<std::size_t>(r)].count() * reduction.element(); };
  std::vector<std::byte> mine(slice_bytes(team.rank()));
  reduce_scatter(team, call, slices, mine.data());
  if (!root) return team.send(call.peer, mine);
  std::vector<transport::Incoming> incoming;
  for (int r = 0; r < team.size(); ++r) {
    auto* const place = bytes_of(call.output) + slices[static_cast<std::size_t>(r)].begin * reduction.element();
    if (r == team.rank()) {
      copy_bytes(place, mine.data(), mine.size());
    } else {
      incoming.push_back({r, place, slice_bytes(r), nullptr, {}});
    }
  }
  team.exchange({}, std::move(incoming));
}

// Large buffers are cut into slices that everybody passes on (van de Geijn: scatter, then all-gather).
void broadcast(Team& team, const Call& call) {
  const std::span<std::byte> data(bytes_of(call.output), call.output.bytes());
  if (team.size() == 2 || data.size() <= kDirectBytes) return tree_broadcast(team, data, call.peer);
  const auto element = size_of(call.output.dtype);
  const auto slices = even_slices(call.output.count, call.output.dtype, team.size());
  if (team.rank() == call.peer) {
    std::vector<transport::Outgoing> outgoing;
    for (int r = 0; r < team.size(); ++r) {
      const auto part = part_of(data.data(), slices[static_cast<std::size_t>(r)], element);
      if (r != call.peer) outgoing.push_back({r, part.data(), part.size(), {}});
    }
    team.exchange(std::move(outgoing), {});
  } else {
    team.receive(call.peer, part_of(data.data(), slices[static_cast<std::size_t>(team.rank())], element));
  }
  ring_all_gather(team, element, data.data(), slices);
}

void all_gather(Team& team, const Call& call) {
  const auto element = size_of(call.output.dtype);
  const auto slices = shares_of(call, call.input.count, team.size());
  copy_bytes(part_of(bytes_of(call.output), slices[static_cast<std::size_t>(team.rank())], element).data(),
             bytes_of(call.input), call.input.bytes());
  ring_all_gather(team, element, bytes_of(call.output), slices);
}

// transfers_of for this rank is what it receives; for the other ranks it tells what this rank sends.
void exchange_parts(Team& team, const Call& call, std::span<const std::size_t> all_counts) {
  const auto element = size_of(call.input.dtype);
  std::vector<transport::Outgoing> outgoing;
  std::vector<transport::Incoming> incoming;
  for (const auto& transfer : transfers_of(call, team.rank(), team.size(), all_counts)) {
    auto* const into = bytes_of(call.output) + transfer.into;
    if (transfer.from == team.rank()) {
      copy_bytes(into, bytes_of(call.input) + transfer.at, transfer.bytes);
    } else {
      incoming.push_back({transfer.from, into, transfer.bytes, nullptr, {}});
    }
  }
  const auto send = [&](int to, const Slice& part) {
    if (to != team.rank() && part.count() > 0) {
      outgoing.push_back({to, bytes_of(call.input) + part.begin * element, part.count() * element, {}});
    }
  };
  for (int r = 0; r < team.size(); ++r) {
    if (call.kind == Kind::all_to_all)
      send(r, share_of(call.counts, call.input.count / static_cast<std::size_t>(team.size()), r));
    if (call.kind == Kind::gather && r == call.peer) send(r, {0, call.input.count});
    if (call.kind == Kind::scatter && team.rank() == call.peer) send(r, share_of(call.counts, call.output.count, r));
  }
  team.exchange(std::move(outgoing), std::move(incoming));
}

}  // namespace

const char* run_on_channels(Team& team, const Call& call, Implementation implementation,
                            std::span<const std::size_t> all_counts) {
  switch (call.kind) {
    case Kind::barrier: dissemination_barrier(team); return "dissemination";
    case Kind::all_reduce: {
      const auto chosen = chosen_for(call, team.size(), implementation);
      all_reduce(team, call, chosen);
      return name_of(chosen);
    }
    case Kind::reduce: reduce(team, call, implementation); return "tree or pairwise";
    case Kind::broadcast: broadcast(team, call); return "tree or scatter and ring";
    case Kind::all_gather: all_gather(team, call); return "ring";
    case Kind::reduce_scatter:
      reduce_scatter(team, call, shares_of(call, call.output.count, team.size()), bytes_of(call.output));
      return "pairwise";
    default: exchange_parts(team, call, all_counts); return "pairwise";
  }
}

}  // namespace lockstep::collective
