#include "gradient/worker_gradients.h"

#include <ATen/core/grad_mode.h>

#include <numeric>

#include "base/text.h"
#include "optimizer/flat_update.h"

namespace lockstep {

WorkerGradients::WorkerGradients(const ReplicatedParameters& parameters, const Communicator& workers,
                                 const WorkerGradientsOptions& options)
    : replicas_(parameters.replicas()),
      compare_copies_every_(options.compare_copies_every),
      place_(parameters.slots().size(), -1),
      slots_(parameters.slots().size()),
      weights_(static_cast<std::size_t>(replicas_)) {
  std::vector<BucketSlot> slots;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto& slot = parameters.slots()[i];
    if (!slot.trainable) continue;
    place_[i] = static_cast<std::int64_t>(trainable_.size());
    trainable_.push_back(i);
    slots.push_back({slot.name, slot.dtype, slot.numel});
  }
  workers.check_all_agree("trainable parameters", join(trainable_));
  buckets_ = std::make_unique<Buckets>(std::move(slots), workers, options.buckets);
  start_step();
}

void WorkerGradients::start_step() {
  scale_known_ = buckets_->weights().scale() > 0;
  scale_ = scale_known_ ? buckets_->weights().scale() : 1;
  MutexLock lock(mutex_);
  for (auto& slot : slots_) {
    slot.gradients.assign(static_cast<std::size_t>(replicas_), {});
    slot.given.assign(static_cast<std::size_t>(replicas_), 0);
    slot.missing = replicas_;
  }
  unfinished_ = replicas_;
  arrived_.clear();
}

void WorkerGradients::give(int replica, std::size_t slot, const at::Tensor& gradient) {
  slots_[slot].gradients[static_cast<std::size_t>(replica)] = gradient;
  slots_[slot].given[static_cast<std::size_t>(replica)] = 1;
  arrive(slot);
}

void WorkerGradients::finish(int replica, double weight) {
  weights_[static_cast<std::size_t>(replica)] = weight;
  for (const auto slot : trainable_) {
    if (!given(replica, slot)) arrive(slot);
  }
  {
    MutexLock lock(mutex_);
    if (--unfinished_ > 0) return;
  }
  const double weight_here = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  buckets_->weights().announce(buckets_->ranks(), weight_here, true, buckets_->overlaps() && scale_known_);
}

void WorkerGradients::arrive(std::size_t slot) {
  {
    MutexLock lock(mutex_);
    if (--slots_[slot].missing > 0) return;
    if (!scale_known_) return arrived_.push_back(slot);
  }
  add_up(slot);
}

// Writes the sum of this process's gradients to the bucket.
void WorkerGradients::add_up(std::size_t index) {
  const at::NoGradGuard no_grad;
  const auto& input = buckets_->input(place(index));
  const auto& mean = buckets_->mean(place(index));  // the same memory, but where 16 bits are sent
  const auto add = [&]<class T>(T) {
    std::vector<const T*> parts;
    for (const auto& gradient : slots_[index].gradients) {
      if (gradient.defined()) parts.push_back(gradient.const_data_ptr<T>());
    }
    if (parts.empty()) return false;
    sum_gradients<T>(parts, {.divide_by = scale_}, mean.mutable_data_ptr<T>(), static_cast<std::size_t>(mean.numel()));
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

void WorkerGradients::wait() {
  auto& weights = buckets_->weights();
  if (scale_known_) {
    buckets_->finish();
    weights.wait(buckets_->ranks());
    return;
  }
  weights.wait(buckets_->ranks());
  if (weights.scale() > 0) scale_ = weights.scale();
  std::vector<std::size_t> arrived;
  {
    MutexLock lock(mutex_);
    arrived = arrived_;
  }
  for (const auto slot : arrived) add_up(slot);
  buckets_->finish();
}

void WorkerGradients::end_step() {
  buckets_->end_pass(0);
  start_step();
}

WorkerGradients::Learned WorkerGradients::learned() const {
  if (!buckets_->knows_order()) return {};
  Learned learned{.weight_scale = buckets_->weights().scale()};
  for (const auto place : buckets_->order()) {
    learned.order.push_back(static_cast<std::int64_t>(trainable_[static_cast<std::size_t>(place)]));
  }
  return learned;
}

void WorkerGradients::restore(const Learned& learned) {
  std::vector<std::int64_t> order;
  for (const auto slot : learned.order) {
    const bool exists = slot >= 0 && static_cast<std::size_t>(slot) < place_.size();
    order.push_back(exists ? place_[static_cast<std::size_t>(slot)] : -1);
  }
  buckets_->restore_order(order);
  buckets_->weights().restore(learned.weight_scale);
  start_step();
}

}  // namespace lockstep
