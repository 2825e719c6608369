// A team of ranks that only have messages, and the algorithms by which the ranks reduce and distribute, each with its
// paper.
#pragma once

#include <span>
#include <vector>

#include "collective/calls.h"
#include "lockstep/collective/make_group.h"
#include "transport/channels.h"

namespace lockstep::collective {

// Memory that is taken again and again. Not zeroed; aligned to 64 bytes.
class Scratch {
 public:
  std::byte* take(std::size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* memory) const { operator delete[](memory, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte[], Free> memory_;
  std::size_t bytes_ = 0;
};

// The operator and the element type of a reduction.
struct ElementOp {
  ReduceOp op;
  DType dtype;
  std::size_t element() const { return size_of(dtype); }
};

class Team {
 public:
  // `members`: ranks of `channels`, this one among them.
  Team(transport::Channels& channels, std::vector<int> members, const transport::MessageTag& tag, Deadline deadline,
       const char* operation, Scratch& scratch);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }

  // As Channels::exchange, with ranks of the team.
  void exchange(std::vector<transport::Outgoing> outgoing, std::vector<transport::Incoming> incoming);

  // One message to a rank and one from a rank, side by side.
  void swap(int to, std::span<const std::byte> out, int from, std::span<std::byte> in);

  // As swap, but folds what comes into `into` as it arrives.
  void swap_and_fold(int to, std::span<const std::byte> out, int from, const ElementOp& reduction, std::byte* into,
                     std::size_t count);

  void send(int to, std::span<const std::byte> bytes) { exchange({{to, bytes.data(), bytes.size(), {}}}, {}); }
  void receive(int from, std::span<std::byte> bytes) {
    exchange({}, {{from, bytes.data(), bytes.size(), nullptr, {}}});
  }
  void receive_and_fold(int from, const ElementOp& reduction, std::byte* into, std::size_t count);

  Scratch& scratch() { return scratch_; }

 private:
  transport::Channels& channels_;
  const std::vector<int> members_;
  const transport::MessageTag tag_;
  const Deadline deadline_;
  const char* const operation_;
  Scratch& scratch_;
  int rank_ = 0;
};

// Elements [slice.begin, slice.end) of an array of `element` bytes each.
inline std::span<std::byte> part_of(std::byte* data, const Slice& slice, std::size_t element) {
  return {data + slice.begin * element, slice.count() * element};
}

// A consumer that accumulates what arrives in `into`.
transport::Consumer folding(const ElementOp& reduction, std::byte* into);

// `data` is the whole buffer, reduced in place; mean is left as the sum, and the caller divides.

// Bandwidth: each rank sends and receives (n-1)/n of the buffer. After it slice rank() of `data` is reduced, and the
// others hold partial results.
void ring_reduce_scatter(Team& team, const ElementOp& reduction, std::byte* data, const std::vector<Slice>& slices);

// Slice r comes from rank r.
void ring_all_gather(Team& team, std::size_t element, std::byte* data, const std::vector<Slice>& slices);

// Bandwidth-optimal for powers of two, in 2 log2 n steps; any number of ranks.
void halving_doubling_all_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count);

// log2 n steps of the whole buffer. After tree_reduce root's data is reduced, and the others' is partial.
void tree_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count, int root);
void tree_broadcast(Team& team, std::span<std::byte> data, int root);

// One step of n-1 messages of the whole buffer: for a few bytes and few ranks. Sums in the order of ranks.
void direct_all_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count);

// n-1 steps; partial results stay where they are, in float32 for 16-bit elements. `result`: this rank's reduced slice.
void pairwise_reduce_scatter(Team& team, const ElementOp& reduction, const std::byte* data,
                             const std::vector<Slice>& slices, std::byte* result);

// Everything to rank `root`, which reduces in the order of ranks.
void star_reduce(Team& team, const ElementOp& reduction, std::byte* data, std::size_t count, int root);
void star_broadcast(Team& team, std::span<std::byte> data, int root);

// log2 n steps of empty messages.
void dissemination_barrier(Team& team);

// Every collective operation, for ranks that communicate by messages. Carries out a collective call; `call.peer` and
// counts are in ranks of the team. Returns the algorithm's name. `all_counts`: of an all_to_all with counts, as in
// transfers_of.
const char* run_on_channels(Team& team, const Call& call, Implementation implementation,
                            std::span<const std::size_t> all_counts);

}  // namespace lockstep::collective
