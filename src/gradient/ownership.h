// Which elements of the parameters each rank and each replica owns, and how they move between ranks: for the updates of
// strategies, for ShardedOptimizer and for fully_shard.
//
//   FlatLayout   where slots lie in a flat buffer; `cut` gives each rank a range of the buffer
//   ShardMap     slots that are cut into equal shares, wherever they lie
//   Ownership    what the ranks own by one of the two, and the collective calls that bring elements to their owners'
//                peers
//   ShardMoves   what travels when one Ownership follows another
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/collective/communicator.h"

namespace lockstep::gradient {

// Elements of one parameter.
struct Shard {
  std::size_t slot;
  std::int64_t begin;
  std::int64_t count;
};
using ShardsOfRanks = std::vector<std::vector<Shard>>;  // [rank]

// The shard of a slot in shards by ascending slot, at most one of a slot; of no elements where there is none.
Shard shard_of(const std::vector<Shard>& shards, std::size_t slot);

// `numel` rounded up to whole cache lines.
inline std::int64_t whole_lines(std::int64_t numel, at::ScalarType dtype) {
  const auto line = 64 / static_cast<std::int64_t>(at::elementSize(dtype));
  return (numel + line - 1) / line * line;
}

// Slots one after the other in a flat buffer of one dtype.
class FlatLayout {
 public:
  struct Place {
    std::size_t slot;
    std::int64_t begin, numel;
  };

  // `aligned`: each slot begins at a cache line. Else there are no gaps.
  explicit FlatLayout(at::ScalarType dtype, bool aligned = true) : dtype_(dtype), aligned_(aligned) {}

  // Returns where the slot begins.
  std::int64_t add(std::size_t slot, std::int64_t numel);

  // Makes the buffer longer, so that `cut` gives all ranks equally many elements, and not none.
  void pad_for(int ranks);

  const std::vector<Place>& places() const { return places_; }
  std::int64_t numel() const { return numel_; }  // of the buffer, with those between slots

  struct Cut {
    Counts counts;         // [rank]: elements of its range
    ShardsOfRanks shards;  // [rank]: what its range has of the slots, in their order
  };

  // Cuts the buffer into one range a rank, at whole cache lines of `sent`, the dtype in which ranks exchange elements.
  Cut cut(int ranks, DType sent) const;

 private:
  at::ScalarType dtype_;
  bool aligned_;
  std::vector<Place> places_;
  std::int64_t numel_ = 0;
};

// Shards by their owner: a replica of this process, or a rank. Constant.
class ShardMap {
 public:
  // Owns no shard.
  ShardMap() = default;

  // Equal shares of the elements, cut at whole cache lines.
  static ShardMap even(std::vector<Shard> owned, int owners);

  // All shards to one owner.
  static ShardMap all_to(int owner, std::vector<Shard> owned, int owners);

  // All shards to each owner.
  static ShardMap all_to_each(std::vector<Shard> owned, int owners);

  // Shares that are given: of the elements of a slot, which lie in one piece, each has those after its predecessor's.
  explicit ShardMap(std::vector<std::vector<Shard>> shares);

  // Ascending, at most one of a slot.
  const std::vector<Shard>& owned() const { return owned_; }
  const std::vector<std::vector<Shard>>& shares() const { return shares_; }  // [owner]

  const std::vector<Shard>& of(int owner) const {
    return shares_.empty() ? owned_ : shares_[static_cast<std::size_t>(owner)];
  }

 private:
  ShardMap(std::vector<Shard> owned, int owners)
      : owned_(std::move(owned)), shares_(static_cast<std::size_t>(owners)) {}

  std::vector<Shard> owned_;
  std::vector<std::vector<Shard>> shares_;  // [owner]
};

// Elements of a flat buffer that the ranks own one after the other.
struct OwnedRange {
  at::ScalarType dtype;
  std::int64_t begin;
  Counts counts;  // [rank]

  std::int64_t count() const;
};

// One division of the elements over processes and their replicas. A constant value, for one Group of the ranks.
class Ownership {
 public:
  // The copies that an owner writes when it updates an element. Other copies get the values by Reduction::publish.
  enum class Writes {
    all_copies,    // of this process
    own_copy,      // of the replica
    first_copy,    // of this process
    first_copies,  // of all ranks, in memory that they share
  };

  // Each of `processes` updates all elements; in this process, `own` says which replica does.
  Ownership(ShardMap own, int processes, Writes writes);

  // Each rank updates its own shards: `shards[rank]`, by ascending slot, at most one of a slot. The replicas of each
  // rank share them evenly. Rank r + `distance_of_copies`, modulo the number of ranks, updates them as well, and so has
  // a copy of the state; 0: nobody does. `ranges`: what gather_values gathers.
  Ownership(Communicator ranks, ShardsOfRanks shards, int replicas, Writes writes, int distance_of_copies = 0,
            std::vector<OwnedRange> ranges = {});

  // Each replica of each rank updates its own shards of its own copy: `shards[rank * replicas + replica]`, which lie in
  // a slot in this order. `ranges`, whose counts are [rank * replicas + replica], are for the replicas to gather.
  Ownership(Communicator ranks, const ShardsOfRanks& shards, int replicas, std::vector<OwnedRange> ranges);

  // The shards that this process owns, and those of another process that it updates by the same sums.
  const ShardMap& own() const { return own_; }
  const ShardMap& copies() const { return copies_; }

  // The shards that a rank owns. Requires is_sharded().
  const std::vector<Shard>& of(int rank) const { return shards_[static_cast<std::size_t>(rank)]; }

  // The shards whose state each process has: its own, and its copies.
  const ShardsOfRanks& held() const { return held_; }

  bool is_sharded() const { return ranks_.has_value(); }
  Writes writes() const { return writes_; }
  const std::vector<OwnedRange>& ranges() const { return ranges_; }

  // The rank whose shards this process has copies of, and the rank that has copies of this process's shards. This rank
  // itself where there are no copies. Requires is_sharded().
  int copied_rank() const;
  int rank_of_copies() const;

  // Replaces each value by its sum over all owners, with the same bits on all. Called by all replicas.
  void sum_over_owners(std::span<double> values, const Group& replicas, Deadline deadline) const;

  // Gathers a slot of shape `sizes` from all owners on rank 0, in host memory; `own` is this process's shard. The
  // result elsewhere is undefined. Returns `own` where each process has all. Collective over the processes.
  at::Tensor gather_slot(std::size_t slot, at::IntArrayRef sizes, const at::Tensor& own) const;

  // Gathers the slot on all ranks, on the device of `own`. Requires is_sharded().
  at::Tensor all_gather_slot(std::size_t slot, at::IntArrayRef sizes, const at::Tensor& own) const;

  // Brings the values in `ranges` from their owners to the flat buffers, by their dtypes, of every process. Collective
  // over the processes.
  void gather_values(const std::function<at::Tensor(at::ScalarType)>& flat) const;

 private:
  Counts counts_of(std::size_t slot) const;

  std::optional<Communicator> ranks_;
  ShardsOfRanks shards_;  // empty where every process has all
  int distance_of_copies_ = 0;
  std::vector<OwnedRange> ranges_;
  ShardMap own_, copies_;
  ShardsOfRanks held_;
  Writes writes_;
};

// How many ranks further the copies of a rank's shards are, so that as many as possible are on other hosts; 0 for a
// rank alone.
int distance_of_copies(const std::vector<std::string>& hosts);

struct ShardMove {
  int from, to;  // equal where the process has it itself
  Shard part;
};

struct ShardMoves {
  std::vector<ShardMove> moves;  // by receiver
  std::vector<Shard> lost;       // elements that nobody has
};

// Which process sends which elements to which. Several may have or need the same elements; where several have what
// another process needs, each sends a part. The result is the same on all processes that have the same lists.
ShardMoves moves_between(const ShardsOfRanks& had, const ShardsOfRanks& needed);

// A shard's elements in several arrays, such as values and their state: flat, on any device.
using ElementsOf = std::function<std::vector<at::Tensor>(const Shard&)>;

// Copies what `from` returns, on the rank that has a part, to what `into` returns on the rank that needs it. Both are
// called in the order of the moves, once each. Collective.
void carry_out(const std::vector<ShardMove>& moves, const Communicator& ranks, const ElementsOf& from,
               const ElementsOf& into);

// The call of gather_in_place.
Call gather_of(const Communicator& ranks, const at::Tensor& whole, const Counts& counts);

// Collective. `whole`: flat and contiguous, best in memory of the Group. Rank r has the r-th of consecutive ranges of
// counts[r] elements, and gets the others.
void gather_in_place(const Communicator& ranks, const at::Tensor& whole, const Counts& counts);

}  // namespace lockstep::gradient
