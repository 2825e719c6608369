#include "gradient/bucketed.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>

#include "collective/calls.h"
#include "gradient/direct.h"
#include "ops/tensors.h"
#include "optimizer/flat_update.h"

namespace lockstep::gradient {
namespace {

Ownership undivided(const ReplicatedParameters& parameters, int processes) {
  return {ShardMap::even(parameters.trainable(), parameters.replicas()), processes, Ownership::Writes::all_copies};
}

}  // namespace

Bucketed::Bucketed(ReplicatedParameters& parameters, Communicator ranks, BucketedOptions options)
    : Reduction(undivided(parameters, ranks.size()), /*during_backward=*/true),
      parameters_(parameters),
      ranks_(std::move(ranks)),
      options_(std::move(options)),
      scales_(options_.buckets.gradient_dtype.has_value()),
      place_(parameters.slots().size(), -1),
      slots_(parameters.slots().size()),
      weights_(static_cast<std::size_t>(parameters.replicas())),
      means_(parameters.slots().size()),
      part_(means_) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!parameters.slots()[i].trainable) continue;
    place_[i] = static_cast<std::int64_t>(trainable_.size());
    trainable_.push_back(i);
  }
  start_step();
}

void Bucketed::prepare() {
  if (buckets_ == nullptr) {
    make_buckets();
  } else if (buckets_->rebuild_after_regroup()) {
    start_step();
  }
  if (options_.shard_state) {
    divide();
  } else {
    ownership_ = undivided(parameters_, ranks_.size());
  }
}

void Bucketed::make_buckets() {
  parameters_.compare_models(ranks_);
  ranks_.check_all_agree("numbers of replicas", std::to_string(parameters_.replicas()));
  std::vector<BucketSlot> slots;
  std::int64_t end = 0;
  for (const auto i : trainable_) {
    const auto& slot = parameters_.slots()[i];
    const bool follows = !slots.empty() && slots.back().dtype == slot.dtype && slot.offset == end;
    slots.push_back({slot.name, slot.dtype, slot.numel, follows});
    end = slot.offset + whole_lines(slot.numel, slot.dtype);
  }
  auto options = options_.buckets;
  options.scatter = options_.shard_state;
  options.called = "the gradients of model";
  buckets_ = std::make_unique<Buckets>(std::move(slots), ranks_, std::move(options));
}

// Each rank owns the range of each bucket whose means it gets.
void Bucketed::divide() {
  parameters_.move_first_copy(ranks_);
  scattered_ = buckets_->scattered();
  std::vector<OwnedRange> ranges;
  ShardsOfRanks shards(static_cast<std::size_t>(ranks_.size()));
  for (const auto& bucket : scattered_) {
    const auto& first = parameters_.slots()[trainable_[bucket.first_slot]];
    ranges.push_back({first.dtype, first.offset, bucket.cut.counts});
    for (std::size_t rank = 0; rank < shards.size(); ++rank) {
      for (const auto& shard : bucket.cut.shards[rank])
        shards[rank].push_back({trainable_[shard.slot], shard.begin, shard.count});
    }
  }
  ownership_ = Ownership(ranks_, std::move(shards), parameters_.replicas(), Ownership::Writes::first_copy,
                         options_.hosts ? distance_of_copies(options_.hosts()) : 0, std::move(ranges));
}

void Bucketed::start_step() {
  scale_known_ = !scales_ || (buckets_ && buckets_->weights().scale() > 0);
  scale_ = scales_ && scale_known_ ? buckets_->weights().scale() : 1;
  for (auto& mean : means_) mean.reset();
  MutexLock lock(mutex_);
  for (auto& slot : slots_) {
    slot.gradients.assign(weights_.size(), {});
    slot.missing = static_cast<int>(weights_.size());
  }
  unfinished_ = static_cast<int>(weights_.size());
  arrived_.clear();
}

// Offers no memory with several replicas in this process: summing their gradients writes the bucket anyway.
at::Tensor Bucketed::memory_for(int replica, std::size_t slot) const {
  if (parameters_.replicas() > 1 || scales_ || place_[slot] < 0) return {};
  return in_shape_of(parameters_.parameter(replica, slot), buckets_->mean(place(slot)));
}

void Bucketed::add(int replica, std::size_t slot, const at::Tensor& gradient) {
  slots_[slot].gradients[static_cast<std::size_t>(replica)] = gradient;
  {
    MutexLock lock(mutex_);
    if (--slots_[slot].missing > 0) return;
    if (!scale_known_) return arrived_.push_back(slot);
  }
  add_up(slot);
}

// Writes the sum of this process's gradients to the bucket.
void Bucketed::add_up(std::size_t index) {
  const at::NoGradGuard no_grad;
  const auto& input = buckets_->input(place(index));
  const auto& mean = buckets_->mean(place(index));  // the same memory as input, unless 16 bits are sent
  const auto sum_up = [&]<class T>(T) {
    std::vector<const T*> parts;
    for (const auto& gradient : slots_[index].gradients) {
      if (gradient.defined()) parts.push_back(gradient.const_data_ptr<T>());
    }
    if (parts.empty()) return false;
    auto* const sum = mean.mutable_data_ptr<T>();
    const bool in_place = parts.size() == 1 && parts[0] == sum && scale_ == 1;
    if (!in_place)
      optimizer::sum_gradients<T>(parts, {.divide_by = scale_}, sum, static_cast<std::size_t>(mean.numel()));
    return true;
  };
  const bool any = mean.scalar_type() == at::kDouble ? sum_up(double()) : sum_up(float());
  if (!any) {
    input.zero_();
  } else if (input.scalar_type() != mean.scalar_type()) {
    input.copy_(mean);
  }
  buckets_->mark_ready(place(index), any);
}

// The last replica of this process announces their weight to the other processes.
Sums Bucketed::finish(const Group& replicas, double weight, bool check_finite, Deadline deadline) {
  weights_[static_cast<std::size_t>(replicas.rank())] = weight;
  const bool is_last = [&] {
    MutexLock lock(mutex_);
    return --unfinished_ <= 0;  // below 0: after a step that broke off without `prepare`
  }();
  if (is_last) {
    check_finite_ = check_finite;
    const double weight_here = std::accumulate(weights_.begin(), weights_.end(), 0.0);
    buckets_->weights().announce(ranks_, weight_here, true, buckets_->overlaps() && scale_known_);
  }
  replicas.barrier(deadline);
  if (replicas.rank() == 0) reduce();
  replicas.barrier(deadline);
  return sums_;
}

void Bucketed::reduce() {
  auto& weights = buckets_->weights();
  if (!scale_known_) {
    weights.wait(ranks_);
    if (weights.scale() > 0) scale_ = weights.scale();
    std::vector<std::size_t> arrived;
    {
      MutexLock lock(mutex_);
      arrived = arrived_;
    }
    for (const auto slot : arrived) add_up(slot);
  }
  buckets_->finish();
  weights.wait(ranks_);
  sums_ = {.weight = weights.total() / (options_.sum ? std::max(1.0, weights.ranks_with_weight()) : 1),
           .divided_by = scale_ * ranks_.size(),
           .finite = !check_finite_ || buckets_->all_finite(),
           .parts = {&part_, 1}};
  for (const auto slot : trainable_)
    means_[slot] = buckets_->has_gradient(place(slot)) ? buckets_->mean(place(slot)) : at::Tensor();
  if (options_.shard_state && options_.hosts && ranks_.size() > 1) copy_sums();
}

// Sends this rank's sums to the rank that has copies of its shards.
void Bucketed::copy_sums() const {
  const int rank = ranks_.rank(), to = ownership_.rank_of_copies(), from = ownership_.copied_rank();
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
  ranks_.group().run(calls, ranks_.deadline());
}

void Bucketed::publish(const Group& replicas, Deadline deadline) {
  if (!options_.shard_state) return;
  const int replica = replicas.rank();
  replicas.barrier(deadline);                                 // all shards of this process are updated
  const bool has_all = options_.hosts && ranks_.size() <= 2;  // its own and the copies
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

void Bucketed::end_step(int replica, StepEnd end) {
  if (replica != 0 || end == StepEnd::broken_off) return;  // after a step that broke off, `prepare` begins anew
  for (auto& mean : means_) mean.reset();                  // they are in buckets that end_pass may make anew
  buckets_->end_pass(0);
  start_step();
}

Reduction::State Bucketed::state() const {
  if (!buckets_) return {};
  State state{.weight_scale = buckets_->weights().scale()};
  if (!buckets_->knows_order() || options_.shard_state) return state;
  for (const auto place : buckets_->order()) {
    state.order.push_back(static_cast<std::int64_t>(trainable_[static_cast<std::size_t>(place)]));
  }
  return state;
}

void Bucketed::restore(const State& state) {
  if (!buckets_) return;
  std::vector<std::int64_t> order;
  for (const auto slot : state.order) {
    const bool exists = slot >= 0 && static_cast<std::size_t>(slot) < place_.size();
    order.push_back(exists ? place_[static_cast<std::size_t>(slot)] : -1);
  }
  if (!order.empty()) buckets_->restore_order(order);
  if (state.weight_scale > 0) buckets_->weights().restore(state.weight_scale);
  start_step();
}

}  // namespace lockstep::gradient
