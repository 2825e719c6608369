#include "gradient/bucketed.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>

#include "base/text.h"
#include "gradient/one_pass.h"
#include "ops/dtypes.h"
#include "optimizer/flat_update.h"

namespace lockstep::gradient {

Bucketed::Bucketed(const ReplicatedParameters& parameters, Communicator ranks, BucketOptions options, bool sum)
    : parameters_(parameters),
      ranks_(std::move(ranks)),
      options_(std::move(options)),
      sum_(sum),
      scales_(options_.gradient_dtype.has_value()),
      place_(parameters.slots().size(), -1),
      slots_(parameters.slots().size()),
      weights_(static_cast<std::size_t>(parameters.replicas())) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!parameters.slots()[i].trainable) continue;
    place_[i] = static_cast<std::int64_t>(trainable_.size());
    trainable_.push_back(i);
  }
  start_step();
}

void Bucketed::prepare() {
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
  auto options = options_;
  options.called = "the gradients of model";
  buckets_ = std::make_unique<Buckets>(std::move(slots), ranks_, std::move(options));
}

void Bucketed::regroup() {
  if (buckets_->rebuild_after_regroup()) start_step();
}

void Bucketed::start_step() {
  scale_known_ = !scales_ || (buckets_ && buckets_->weights().scale() > 0);
  scale_ = scales_ && scale_known_ ? buckets_->weights().scale() : 1;
  MutexLock lock(mutex_);
  for (auto& slot : slots_) {
    slot.gradients.assign(weights_.size(), {});
    slot.given.assign(weights_.size(), 0);
    slot.missing = static_cast<int>(weights_.size());
  }
  unfinished_ = static_cast<int>(weights_.size());
  arrived_.clear();
}

// None with several replicas in this process: summing their gradients writes the bucket anyway.
at::Tensor Bucketed::memory_for(int replica, std::size_t slot) const {
  if (parameters_.replicas() > 1 || scales_ || !takes(slot)) return {};
  return in_shape_of(parameters_.parameter(replica, slot), buckets_->mean(place(slot)));
}

void Bucketed::on_ready(int replica, std::size_t slot, const at::Tensor& gradient) {
  slots_[slot].gradients[static_cast<std::size_t>(replica)] = gradient;
  slots_[slot].given[static_cast<std::size_t>(replica)] = 1;
  arrive(slot);
}

void Bucketed::finish(int replica, double weight, bool check_finite) {
  weights_[static_cast<std::size_t>(replica)] = weight;
  for (const auto slot : trainable_) {
    if (!is_ready(replica, slot)) arrive(slot);
  }
  {
    MutexLock lock(mutex_);
    if (--unfinished_ > 0) return;
  }
  check_finite_ = check_finite;
  const double weight_here = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  buckets_->weights().announce(ranks_, weight_here, true, buckets_->overlaps() && scale_known_);
}

void Bucketed::arrive(std::size_t slot) {
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
  const auto add = [&]<class T>(T) {
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
  const bool any = mean.scalar_type() == at::kDouble ? add(double()) : add(float());
  if (!any) {
    input.zero_();
  } else if (input.scalar_type() != mean.scalar_type()) {
    input.copy_(mean);
  }
  buckets_->mark_ready(place(index), any);
}

void Bucketed::wait(const Group& replicas, Deadline deadline) {
  if (replicas.rank() == 0) reduce();
  replicas.barrier(deadline);
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
  totals_ = {.weight = weights.total() / (sum_ ? std::max(1.0, weights.ranks_with_weight()) : 1),
             .divided_by = scale_ * ranks_.size(),
             .finite = !check_finite_ || buckets_->all_finite()};
}

std::vector<const at::Tensor*> Bucketed::sources(std::size_t slot) const {
  if (place_[slot] < 0 || !buckets_->has_gradient(place(slot))) return {};
  return {&buckets_->mean(place(slot))};
}

void Bucketed::end_step(int replica) {
  if (replica != 0) return;
  buckets_->end_pass(0);
  start_step();
}

GradientSync::State Bucketed::state() const {
  if (!buckets_) return {};
  State state{.weight_scale = buckets_->weights().scale()};
  if (!buckets_->knows_order() || options_.scatter) return state;
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
