#include "gradient/ownership.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "collective/calls.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/tensors.h"

namespace lockstep::gradient {
namespace {

// Shards are cut at multiples of this many elements: whole cache lines for float and double.
constexpr std::int64_t kCut = 16;

// Elements below which a part is not divided among those that have it.
constexpr std::int64_t kDivided = 16384;

struct Holder {
  int rank;
  std::int64_t begin, end;
};
using Holders = std::map<std::size_t, std::vector<Holder>>;  // [slot]

Holders holders_of(const ShardsOfRanks& had) {
  Holders holders;
  for (std::size_t rank = 0; rank < had.size(); ++rank) {
    for (const auto& shard : had[rank]) {
      holders[shard.slot].push_back({static_cast<int>(rank), shard.begin, shard.begin + shard.count});
    }
  }
  return holders;
}

// Returns where, within the shard, another set of ranks begins to have the elements; and the shard's begin and end.
std::vector<std::int64_t> cuts_of(const Shard& shard, const std::vector<Holder>& holders) {
  std::vector<std::int64_t> cuts{shard.begin, shard.begin + shard.count};
  for (const auto& holder : holders) {
    for (const auto at : {holder.begin, holder.end}) {
      if (at > shard.begin && at < shard.begin + shard.count) cuts.push_back(at);
    }
  }
  std::ranges::sort(cuts);
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

void add_moves(const Shard& part, const std::vector<int>& from, int to, std::vector<ShardMove>& moves) {
  const auto count = static_cast<std::int64_t>(from.size());
  if (part.count < kDivided) {
    const auto one = static_cast<std::int64_t>(part.slot) + to;
    moves.push_back({from[static_cast<std::size_t>(one % count)], to, part});
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const auto begin = part.count * i / count, end = part.count * (i + 1) / count;
    moves.push_back({from[static_cast<std::size_t>(i)], to, {part.slot, part.begin + begin, end - begin}});
  }
}

}  // namespace

Shard shard_of(const std::vector<Shard>& shards, std::size_t slot) {
  const auto found = std::ranges::lower_bound(shards, slot, {}, &Shard::slot);
  return found == shards.end() || found->slot != slot ? Shard{slot, 0, 0} : *found;
}

std::int64_t FlatLayout::add(std::size_t slot, std::int64_t numel) {
  places_.push_back({slot, numel_, numel});
  numel_ += aligned_ ? whole_lines(numel, dtype_) : numel;
  return places_.back().begin;
}

void FlatLayout::pad_for(int ranks) {
  const auto unit = whole_lines(1, dtype_) * ranks;
  numel_ = (std::max<std::int64_t>(numel_, 1) + unit - 1) / unit * unit;
}

FlatLayout::Cut FlatLayout::cut(int ranks, DType sent) const {
  Cut cut;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto range = collective::even_slice(static_cast<std::size_t>(numel_), sent, rank, ranks);
    cut.counts.push_back(range.count());
    auto& shards = cut.shards.emplace_back();
    for (const auto& place : places_) {
      const auto begin = std::clamp<std::int64_t>(static_cast<std::int64_t>(range.begin) - place.begin, 0, place.numel);
      const auto end = std::clamp<std::int64_t>(static_cast<std::int64_t>(range.end) - place.begin, 0, place.numel);
      if (begin < end) shards.push_back({place.slot, begin, end - begin});
    }
  }
  return cut;
}

ShardMap ShardMap::all_to(int owner, std::vector<Shard> owned, int owners) {
  ShardMap map(std::move(owned), owners);
  map.shares_[static_cast<std::size_t>(owner)] = map.owned_;
  return map;
}

ShardMap ShardMap::all_to_each(std::vector<Shard> owned, int owners) {
  ShardMap map(std::move(owned), owners);
  for (auto& share : map.shares_) share = map.owned_;
  return map;
}

ShardMap::ShardMap(std::vector<std::vector<Shard>> shares) : shares_(std::move(shares)) {
  std::map<std::size_t, Shard> by_slot;
  for (const auto& share : shares_) {
    for (const auto& shard : share) {
      const auto [found, is_new] = by_slot.emplace(shard.slot, shard);
      if (is_new) continue;
      if (shard.begin != found->second.begin + found->second.count) throw Error("shares of a slot with a gap");
      found->second.count += shard.count;
    }
  }
  for (const auto& [slot, shard] : by_slot) owned_.push_back(shard);
}

ShardMap ShardMap::even(std::vector<Shard> owned, int owners) {
  ShardMap map(std::move(owned), owners);
  std::int64_t total = 0;
  for (const auto& shard : map.owned_) total += shard.count;
  std::int64_t owner = 0, done = 0;
  const auto end_of = [&](std::int64_t one) { return total * (one + 1) / owners; };
  for (const auto& shard : map.owned_) {
    for (std::int64_t at = 0; at < shard.count;) {
      while (owner + 1 < owners && done >= end_of(owner)) ++owner;
      std::int64_t count = shard.count - at;
      if (owner + 1 < owners) count = std::min(count, (end_of(owner) - done + kCut - 1) / kCut * kCut);
      map.shares_[static_cast<std::size_t>(owner)].push_back({shard.slot, shard.begin + at, count});
      at += count;
      done += count;
    }
  }
  return map;
}

std::int64_t OwnedRange::count() const {
  return static_cast<std::int64_t>(std::accumulate(counts.begin(), counts.end(), std::size_t{0}));
}

Ownership::Ownership(ShardMap own, int processes, Writes writes)
    : own_(std::move(own)), held_(static_cast<std::size_t>(processes), own_.owned()), writes_(writes) {}

Ownership::Ownership(Communicator ranks, ShardsOfRanks shards, int replicas, Writes writes, int distance_of_copies,
                     std::vector<OwnedRange> ranges)
    : ranks_(std::move(ranks)),
      shards_(std::move(shards)),
      distance_of_copies_(distance_of_copies),
      ranges_(std::move(ranges)),
      own_(ShardMap::even(shards_[static_cast<std::size_t>(ranks_->rank())], replicas)),
      held_(shards_),
      writes_(writes) {
  if (distance_of_copies == 0) return;
  copies_ = ShardMap::even(shards_[static_cast<std::size_t>(copied_rank())], replicas);
  const auto size = shards_.size();
  for (std::size_t rank = 0; rank < size; ++rank) {
    const auto& copied = shards_[(rank + size - static_cast<std::size_t>(distance_of_copies)) % size];
    held_[rank].insert(held_[rank].end(), copied.begin(), copied.end());
  }
}

Ownership::Ownership(Communicator ranks, const ShardsOfRanks& shards, int replicas, std::vector<OwnedRange> ranges)
    : ranks_(std::move(ranks)), ranges_(std::move(ranges)), writes_(Writes::own_copy) {
  for (int rank = 0; rank < ranks_->size(); ++rank) {
    const auto first = shards.begin() + static_cast<std::ptrdiff_t>(rank) * replicas;
    ShardMap of_rank(ShardsOfRanks(first, first + replicas));
    shards_.push_back(of_rank.owned());
    if (rank == ranks_->rank()) own_ = std::move(of_rank);
  }
  held_ = shards_;
}

int Ownership::copied_rank() const {
  const int size = static_cast<int>(shards_.size());
  return (ranks_->rank() + size - distance_of_copies_) % size;
}

int Ownership::rank_of_copies() const {
  return (ranks_->rank() + distance_of_copies_) % static_cast<int>(shards_.size());
}

void Ownership::sum_over_owners(std::span<double> values, const Group& replicas, Deadline deadline) const {
  replicas.all_reduce(buffer_of(values), ReduceOp::sum, deadline);
  if (!ranks_) return;
  if (replicas.rank() == 0) ranks_->sum(values);
  replicas.broadcast(buffer_of(values), 0, deadline);
}

Counts Ownership::counts_of(std::size_t slot) const {
  Counts counts;
  for (const auto& shards : shards_) counts.push_back(static_cast<std::size_t>(shard_of(shards, slot).count));
  return counts;
}

at::Tensor Ownership::gather_slot(std::size_t slot, at::IntArrayRef sizes, const at::Tensor& own) const {
  if (!ranks_) return own;
  const auto part = own.cpu();
  const auto whole = ranks_->rank() == 0 ? at::empty(sizes, part.options()) : at::Tensor();
  const auto output = whole.defined() ? buffer_of(whole) : Buffer{nullptr, 0, ops::dtype_of(part.scalar_type())};
  ranks_->group().run(Call::gather(buffer_of(part), output, /*root=*/0, counts_of(slot)), ranks_->deadline());
  return whole;
}

at::Tensor Ownership::all_gather_slot(std::size_t slot, at::IntArrayRef sizes, const at::Tensor& own) const {
  const at::NoGradGuard no_grad;
  const auto part = own.cpu().contiguous();
  const auto whole = at::empty(sizes, part.options());
  ranks_->group().run(Call::all_gather(buffer_of(part), buffer_of(whole), counts_of(slot)), ranks_->deadline());
  return whole.to(own.device());
}

void Ownership::gather_values(const std::function<at::Tensor(at::ScalarType)>& flat) const {
  for (const auto& range : ranges_)
    gather_in_place(*ranks_, flat(range.dtype).narrow(0, range.begin, range.count()), range.counts);
}

int distance_of_copies(const std::vector<std::string>& hosts) {
  int best = 0;
  std::size_t most = 0;
  for (std::size_t distance = 1; distance < hosts.size(); ++distance) {
    std::size_t elsewhere = 1;  // any distance is better than none
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      if (hosts[rank] != hosts[(rank + distance) % hosts.size()]) ++elsewhere;
    }
    if (elsewhere <= most) continue;
    most = elsewhere;
    best = static_cast<int>(distance);
  }
  return best;
}

ShardMoves moves_between(const ShardsOfRanks& had, const ShardsOfRanks& needed) {
  const auto all = holders_of(had);
  const std::vector<Holder> none;
  ShardMoves result;
  for (std::size_t rank = 0; rank < needed.size(); ++rank) {
    const int to = static_cast<int>(rank);
    for (const auto& shard : needed[rank]) {
      const auto found = all.find(shard.slot);
      const auto& holders = found == all.end() ? none : found->second;
      const auto cuts = cuts_of(shard, holders);
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        const Shard part{shard.slot, cuts[i], cuts[i + 1] - cuts[i]};
        std::vector<int> from;
        for (const auto& holder : holders) {
          if (holder.begin <= part.begin && part.begin < holder.end) from.push_back(holder.rank);
        }
        if (from.empty()) {
          result.lost.push_back(part);
        } else if (std::ranges::find(from, to) != from.end()) {
          result.moves.push_back({to, to, part});
        } else {
          add_moves(part, from, to, result.moves);
        }
      }
    }
  }
  return result;
}

void carry_out(const std::vector<ShardMove>& moves, const Communicator& ranks, const ElementsOf& from,
               const ElementsOf& into) {
  const at::NoGradGuard no_grad;
  const int me = ranks.rank();
  std::vector<Call> calls;
  std::vector<at::Tensor> in_host;                          // while they are sent
  std::vector<std::pair<at::Tensor, at::Tensor>> received;  // for other devices: to, from
  for (const auto& [sender, receiver, part] : moves) {
    if (sender == me && receiver == me) {
      const auto own = from(part), places = into(part);
      for (std::size_t i = 0; i < own.size(); ++i) {
        if (!places[i].is_alias_of(own[i])) places[i].copy_(own[i]);
      }
    } else if (sender == me) {
      for (const auto& elements : from(part)) {
        in_host.push_back(elements.cpu());
        calls.push_back(Call::send(buffer_of(in_host.back()), receiver));
      }
    } else if (receiver == me) {
      for (const auto& elements : into(part)) {
        in_host.push_back(elements.is_cpu() ? elements : at::empty_like(elements, at::TensorOptions(at::kCPU)));
        if (!elements.is_cpu()) received.emplace_back(elements, in_host.back());
        calls.push_back(Call::recv(buffer_of(in_host.back()), sender));
      }
    }
  }
  if (!calls.empty()) ranks.group().run(calls, ranks.deadline());
  for (const auto& [to, host] : received) to.copy_(host);
}

Call gather_of(const Communicator& ranks, const at::Tensor& whole, const Counts& counts) {
  const auto share = collective::share_of(counts, 0, ranks.rank());
  const auto own = whole.narrow(0, static_cast<std::int64_t>(share.begin), static_cast<std::int64_t>(share.count()));
  auto call = Call::all_gather(buffer_of(own), buffer_of(whole), counts);
  call.purpose = ranks.purpose();
  return on_stream_of(whole, call);
}

void gather_in_place(const Communicator& ranks, const at::Tensor& whole, const Counts& counts) {
  ranks.group().run(gather_of(ranks, whole, counts), ranks.deadline());
}

}  // namespace lockstep::gradient
