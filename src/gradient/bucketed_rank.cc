#include "gradient/bucketed_rank.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/div.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "gradient/direct.h"
#include "optimizer/flat_update.h"

namespace lockstep::gradient {

BucketedRank::BucketedRank(ReplicatedParameters& parameters, ReplicasOfRank who, BucketOptions options, bool sum)
    : parameters_(parameters),
      who_(std::move(who)),
      options_(std::move(options)),
      sum_(sum),
      scales_(options_.gradient_dtype.has_value() && options_.gradient_dtype != DType::int8),
      place_(parameters.slots().size(), -1),
      slots_(parameters.slots().size()),
      weights_(static_cast<std::size_t>(who_.count)),
      means_(parameters.slots().size()),
      part_(means_) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!parameters.slots()[i].trainable) continue;
    place_[i] = static_cast<std::int64_t>(trainable_.size());
    trainable_.push_back(i);
  }
  start_step();
}

// The Group has failed. Soon all its calls are told to have ended.
void BucketedRank::look_at_last_update() {
  constexpr std::chrono::seconds kSoon(10);
  try {
    last_update_->group.synchronize(Deadline::after(kSoon));
  } catch (const Error&) {
  }
  lost_update_ = std::ranges::any_of(last_update_->calls, [](const Work& call) { return !call.succeeded(); });
  last_update_.reset();
}

void BucketedRank::make_buckets() {
  if (buckets_ != nullptr) {
    const auto now = who_.ranks.group().shared_backend();
    if (last_update_ && last_update_->group.shared_backend() != now) look_at_last_update();
    if (buckets_->rebuild_after_regroup()) start_step();
    return;
  }
  std::vector<at::Tensor> on_device;  // none where values are updated in host memory
  if (who_.count == 1 && parameters_.placement() == Placement::device) {
    for (const auto i : trainable_) on_device.push_back(parameters_.parameter(who_.first, i));
  }
  device_ = device_of_sums(who_.ranks, on_device);
  std::vector<BucketSlot> slots;
  std::int64_t end = 0;
  for (const auto i : trainable_) {
    const auto& slot = parameters_.slots()[i];
    const bool follows = !slots.empty() && slots.back().dtype == slot.dtype && slot.offset == end;
    slots.push_back({slot.name, slot.dtype, slot.numel, follows, device_});
    end = slot.offset + whole_lines(slot.numel, slot.dtype);
  }
  buckets_ = std::make_unique<Buckets>(std::move(slots), who_.ranks, options_);
}

void BucketedRank::start_step() {
  is_clean_ = true;
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

// Offers no memory with several replicas in this rank: summing their gradients writes the bucket anyway.
at::Tensor BucketedRank::memory_for(int replica, std::size_t slot) const {
  if (who_.count > 1 || scales_ || place_[slot] < 0) return {};
  return in_shape_of(parameters_.parameter(replica, slot), buckets_->mean(place(slot)));
}

void BucketedRank::add(int replica, std::size_t slot, const at::Tensor& gradient) {
  slots_[slot].gradients[number(replica)] = gradient;
  is_clean_ = false;
  {
    MutexLock lock(mutex_);
    if (--slots_[slot].missing > 0) return;
    if (!scale_known_) return arrived_.push_back(slot);
  }
  add_up(slot);
}

// Writes the sum of this rank's gradients to the bucket.
void BucketedRank::add_up(std::size_t index) {
  const at::NoGradGuard no_grad;
  const auto& input = buckets_->input(place(index));
  const auto& mean = buckets_->mean(place(index));  // the same memory as input, unless 16 bits are sent
  std::vector<at::Tensor> gradients;
  for (const auto& gradient : slots_[index].gradients) {
    if (gradient.defined()) gradients.push_back(gradient.view({-1}));
  }
  if (gradients.empty()) {
    input.zero_();
  } else {
    mean.is_cpu() ? sum_on_host(gradients, mean) : sum_on_gpu(gradients[0], mean);
    if (input.scalar_type() != mean.scalar_type()) input.copy_(mean);
  }
  buckets_->mark_ready(place(index), !gradients.empty());
}

void BucketedRank::sum_on_host(const std::vector<at::Tensor>& gradients, const at::Tensor& sum) const {
  const auto sum_up = [&]<class T>(T) {
    std::vector<const T*> parts;
    for (const auto& gradient : gradients) parts.push_back(gradient.const_data_ptr<T>());
    auto* const into = sum.mutable_data_ptr<T>();
    const bool in_place = parts.size() == 1 && parts[0] == into && scale_ == 1;
    if (!in_place)
      optimizer::sum_gradients<T>(parts, {.divide_by = scale_}, into, static_cast<std::size_t>(sum.numel()));
  };
  sum.scalar_type() == at::kDouble ? sum_up(double()) : sum_up(float());
}

void BucketedRank::sum_on_gpu(const at::Tensor& gradient, at::Tensor sum) const {
  scale_ == 1 ? sum.copy_(gradient) : at::div_out(sum, gradient, at::Scalar(scale_));
}

void BucketedRank::announce(int replica, double weight, bool check_finite) {
  weights_[number(replica)] = weight;
  {
    MutexLock lock(mutex_);
    if (--unfinished_ > 0) return;  // below 0: after a step that broke off without make_buckets
  }
  check_finite_ = check_finite;
  const double weight_here = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  buckets_->weights().announce(who_.ranks, weight_here, true, buckets_->overlaps() && scale_known_);
}

void BucketedRank::reduce() {
  auto& weights = buckets_->weights();
  if (!scale_known_) {
    weights.wait(who_.ranks);
    if (weights.scale() > 0) scale_ = weights.scale();
    std::vector<std::size_t> arrived;
    {
      MutexLock lock(mutex_);
      arrived = arrived_;
    }
    for (const auto slot : arrived) add_up(slot);
  }
  buckets_->finish();
  weights.wait(who_.ranks);
  if (device_.is_cuda()) last_update_ = LastUpdate{who_.ranks.group(), buckets_->started()};
  sums_ = {.weight = weights.total() / (sum_ ? std::max(1.0, weights.ranks_with_weight()) : 1),
           .divided_by = scale_ * who_.ranks.size(),
           .finite = !check_finite_ || buckets_->all_finite(),
           .parts = {&part_, 1},
           .owners = options_.scatter ? &who_.ranks : nullptr};
  for (const auto slot : trainable_)
    means_[slot] = buckets_->has_gradient(place(slot)) ? buckets_->mean(place(slot)) : at::Tensor();
}

void BucketedRank::end_step() {
  for (auto& mean : means_) mean.reset();  // they are in buckets that end_pass may make anew
  buckets_->end_pass(0);
  start_step();
}

Reduction::State BucketedRank::state() const {
  if (!buckets_) return {};
  Reduction::State state{.weight_scale = buckets_->weights().scale()};
  if (!buckets_->knows_order() || options_.scatter) return state;
  for (const auto place : buckets_->order()) {
    state.order.push_back(static_cast<std::int64_t>(trainable_[static_cast<std::size_t>(place)]));
  }
  return state;
}

void BucketedRank::restore(const Reduction::State& state) {
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
