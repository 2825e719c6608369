#include "gradient/bucketed.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "collective/calls.h"
#include "lockstep/base/error.h"
#include "ops/tensors.h"

namespace lockstep::gradient {
namespace {

// Replicas that have their values on their devices each update their own.
Ownership undivided(const ReplicatedParameters& parameters, int processes) {
  const int replicas = parameters.replicas();
  const bool on_devices = parameters.placement() == Placement::device;
  return {on_devices ? ShardMap::all_to_each(parameters.trainable(), replicas)
                     : ShardMap::even(parameters.trainable(), replicas),
          processes, on_devices ? Ownership::Writes::own_copy : Ownership::Writes::all_copies};
}

}  // namespace

Bucketed::Bucketed(ReplicatedParameters& parameters, Communicator processes, BucketedOptions options)
    : Reduction(undivided(parameters, processes.size()), /*during_backward=*/true),
      parameters_(parameters),
      processes_(std::move(processes)),
      options_(std::move(options)) {
  auto buckets = options_.buckets;
  buckets.scatter = options_.shard_state;
  buckets.called = "the gradients of model";
  const auto add_rank = [&](const Communicator& ranks, int first, int count) {
    ranks_.push_back(
        std::make_unique<BucketedRank>(parameters_, ReplicasOfRank{ranks, first, count}, buckets, options_.sum));
  };
  if (is_rank()) {
    add_rank(processes_, 0, parameters.replicas());
  } else {
    for (int replica = 0; replica < parameters.replicas(); ++replica)
      add_rank(options_.replicas->of[static_cast<std::size_t>(replica)], replica, 1);
  }
}

void Bucketed::prepare() {
  if (ranks_[0]->buckets() == nullptr) {
    parameters_.compare_models(processes_);
    processes_.check_all_agree("numbers of replicas", std::to_string(parameters_.replicas()));
  }
  if (is_rank()) {
    ranks_[0]->make_buckets();
  } else {
    options_.replicas->on_replicas([this](int replica) { rank_of(replica).make_buckets(); });
  }
  if (options_.shard_state) {
    divide();
  } else {
    ownership_ = undivided(parameters_, processes_.size());
  }
}

// Each rank owns the range of each bucket whose means it gets.
void Bucketed::divide() {
  const auto& trainable = ranks_[0]->trainable();
  const bool on_devices = parameters_.placement() == Placement::device;
  if (!on_devices) parameters_.move_first_copy(processes_);
  scattered_ = ranks_[0]->buckets()->scattered();
  std::vector<OwnedRange> ranges;
  ShardsOfRanks shards(static_cast<std::size_t>(ranks_[0]->ranks().size()));
  for (const auto& bucket : scattered_) {
    const auto& first = parameters_.slots()[trainable[bucket.first_slot]];
    ranges.push_back({first.dtype, first.offset, bucket.cut.counts});
    for (std::size_t rank = 0; rank < shards.size(); ++rank) {
      for (const auto& shard : bucket.cut.shards[rank])
        shards[rank].push_back({trainable[shard.slot], shard.begin, shard.count});
    }
  }
  const int replicas = parameters_.replicas(), distance = options_.hosts ? distance_of_copies(options_.hosts()) : 0;
  ownership_ = on_devices ? Ownership(processes_, shards, replicas, std::move(ranges))
                          : Ownership(processes_, std::move(shards), replicas, Ownership::Writes::first_copy, distance,
                                      std::move(ranges));
}

// The replicas of one process get a new Group after a step that failed on one of them.
void Bucketed::begin_step(int replica) {
  if (is_rank()) return;
  auto& rank = rank_of(replica);
  rank.make_buckets();
  if (rank.take_lost_update()) lost_update_ = true;
  if (rank.is_clean()) return;
  throw Error(
      "a step broke off on this replica after others had begun to sum its gradients: let its exception leave "
      "Strategy::run, which ends the step on all replicas");
}

at::Tensor Bucketed::memory_for(int replica, std::size_t slot) const {
  return rank_of(replica).memory_for(replica, slot);
}

void Bucketed::add(int replica, std::size_t slot, const at::Tensor& gradient) {
  rank_of(replica).add(replica, slot, gradient);
}

Sums Bucketed::finish(const Group& replicas, double weight, bool check_finite, Deadline deadline) {
  const int replica = replicas.rank();
  auto& rank = rank_of(replica);
  rank.announce(replica, weight, check_finite);
  if (!is_rank()) {
    rank.reduce();
    return rank.sums();
  }
  replicas.barrier(deadline);
  if (replica == 0) {
    rank.reduce();
    if (options_.shard_state && options_.hosts && processes_.size() > 1) copy_sums();
  }
  replicas.barrier(deadline);
  return rank.sums();
}

// Sends this rank's sums to the rank that has copies of its shards.
void Bucketed::copy_sums() const {
  const int rank = processes_.rank(), to = ownership_.rank_of_copies(), from = ownership_.copied_rank();
  std::vector<Call> calls;
  for (const auto& bucket : scattered_) {
    const auto part_of = [&](int owner) {
      const auto part = collective::share_of(bucket.cut.counts, 0, owner);
      const auto dtype = ops::dtype_of(bucket.mean.scalar_type());
      auto* const sums = static_cast<std::byte*>(bucket.mean.mutable_data_ptr());
      return Buffer{sums + part.begin * size_of(dtype), part.count(), dtype};
    };
    const auto mine = part_of(rank), theirs = part_of(from);
    if (mine.count > 0) calls.push_back(Call::send(mine, to));
    if (theirs.count > 0) calls.push_back(Call::recv(theirs, from));
  }
  processes_.group().run(calls, processes_.deadline());
}

void Bucketed::publish(const Group& replicas, Deadline deadline) {
  if (!options_.shard_state) return;
  const int replica = replicas.rank();
  if (ownership_.writes() == Ownership::Writes::own_copy) return gather_copy(replica);
  replicas.barrier(deadline);                                     // all shards of this process are updated
  const bool has_all = options_.hosts && processes_.size() <= 2;  // its own and the copies
  if (replica == 0 && !has_all)
    ownership_.gather_values([this](at::ScalarType dtype) { return parameters_.flat(0, dtype); });
  replicas.barrier(deadline);
  if (replica == 0 || replica >= parameters_.copies()) return;
  const at::NoGradGuard no_grad;
  for (const auto& range : ownership_.ranges()) {
    const auto values = [&](int copy) {
      return parameters_.flat(copy, range.dtype).narrow(0, range.begin, range.count());
    };
    values(replica).copy_(values(0));
  }
}

// Brings a replica that has its values on its GPU those of all ranks' shards.
void Bucketed::gather_copy(int replica) const {
  auto& rank = rank_of(replica);
  const auto& ranks = rank.ranks();
  for (const auto& range : ownership_.ranges()) {
    const auto whole = parameters_.flat(replica, range.dtype).narrow(0, range.begin, range.count());
    const auto gathering = ranks.group().start(gather_of(ranks, whole, range.counts), ranks.deadline());
    gathering.wait();
    rank.remember(gathering);
  }
}

void Bucketed::end_step(int replica, StepEnd end) {
  auto& rank = rank_of(replica);
  if (replica != rank.first_replica() || end == StepEnd::broken_off) return;  // then make_buckets begins anew
  rank.end_step();
}

void Bucketed::restore(const State& state) {
  for (const auto& rank : ranks_) rank->restore(state);
}

}  // namespace lockstep::gradient
