#include "gradient/worker_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/all.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/text.h"
#include "gradient/dtypes.h"
#include "lockstep/error.h"
#include "optimizer/flat_update.h"

namespace lockstep {
namespace {

constexpr std::size_t kBuckets = 16, kSmallest = 1 << 20, kLargest = 25 << 20;

}  // namespace

WorkerGradients::WorkerGradients(const ReplicatedParameters& parameters, Workers workers,
                                 WorkerGradientsOptions options)
    : parameters_(parameters),
      workers_(std::move(workers)),
      options_(std::move(options)),
      overlap_(workers_.all(may_overlap(workers_.group(), workers_.idle_cores()))),
      slots_(parameters_.slots().size()),
      weights_(static_cast<std::size_t>(parameters_.replicas())) {
  for (std::size_t i = slots_.size(); i-- > 0;) {  // backward goes from the last to the first, mostly
    if (parameters_.slots()[i].trainable) order_.push_back(static_cast<std::int64_t>(i));
  }
  workers_.require_same("trainable parameters", join(order_));
  make_buckets();
}

WorkerGradients::~WorkerGradients() {
  // What was started works on memory of this object; only a step that broke off leaves any.
  const auto end = [this](const std::optional<Work>& work) {
    if (!work || work->done()) return;
    workers_.group().abort("a step broke off in the middle");
    try {
      work->wait();
    } catch (const Error&) {
    }
  };
  end(tally_);
  for (const auto& bucket : buckets_) end(bucket.work);
}

// Fills buckets in order_, with slots of one dtype each.
void WorkerGradients::make_buckets() {
  buckets_.clear();
  std::size_t all = 0;
  for (const auto i : order_) {
    const auto& slot = parameters_.slots()[static_cast<std::size_t>(i)];
    all += static_cast<std::size_t>(slot.numel) * at::elementSize(slot.dtype);
  }
  // Small ones are on their way while backward goes on; each has its price, so a large model has larger ones. Where
  // none starts before the end, one is best.
  const auto later =
      options_.bucket_bytes > 0 ? options_.bucket_bytes : std::clamp(all / kBuckets, kSmallest, kLargest);
  std::vector<at::ScalarType> types;
  std::int64_t bytes = 0;
  for (const auto index : order_) {
    const auto& info = parameters_.slots()[static_cast<std::size_t>(index)];
    const auto own = info.numel * static_cast<std::int64_t>(at::elementSize(info.dtype));
    const auto most = !overlap_ ? all : buckets_.size() <= 2 ? options_.first_bucket_bytes : later;
    const bool full = static_cast<std::size_t>(bytes + own) > most;
    if (buckets_.empty() || types.back() != info.dtype || full) {
      buckets_.emplace_back();
      types.push_back(info.dtype);
      bytes = 0;
    }
    bytes += own;
    buckets_.back().slots.push_back(static_cast<std::size_t>(index));
  }
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    auto& bucket = buckets_[b];
    std::int64_t elements = 0;
    std::vector<std::string> names;
    for (const auto i : bucket.slots) {
      elements += parameters_.slots()[i].numel;
      names.push_back(parameters_.slots()[i].name);
    }
    bucket.names = std::make_shared<std::string>(first_of(names));
    const auto flags = static_cast<std::int64_t>(bucket.slots.size());
    bucket.shortened = options_.wire && types[b] == at::kFloat;
    const auto dtype = bucket.shortened ? *options_.wire : dtype_of(types[b]);
    const auto count = static_cast<std::size_t>(elements + flags);
    bucket.memory = workers_.group().allocate(count * size_of(dtype));
    bucket.buffer = {bucket.memory.get(), count, dtype};
    const auto whole = at::from_blob(bucket.memory.get(), {elements + flags}, at::TensorOptions(scalar_type_of(dtype)));
    bucket.sent = whole.narrow(0, 0, elements);
    bucket.flags = whole.narrow(0, elements, flags);
    bucket.sum = bucket.shortened ? at::zeros({elements}, at::kFloat) : bucket.sent;
    std::int64_t at = 0, flag = 0;
    for (const auto i : bucket.slots) {
      const auto numel = parameters_.slots()[i].numel;
      slots_[i].bucket = b;
      slots_[i].sent = bucket.sent.narrow(0, at, numel);
      slots_[i].sum = bucket.sum.narrow(0, at, numel);
      slots_[i].flag = bucket.flags.narrow(0, flag++, 1);
      at += numel;
    }
  }
  reset();
}

void WorkerGradients::reset() {
  divided_by_ = 1;
  const auto replicas = static_cast<std::size_t>(parameters_.replicas());
  for (auto& bucket : buckets_) bucket.missing = bucket.slots.size();
  for (auto& slot : slots_) slot.given.assign(replicas, 0);
  for (const auto i : order_) {
    auto& slot = slots_[static_cast<std::size_t>(i)];
    slot.gradients.assign(replicas, {});
    slot.missing = parameters_.replicas();
  }
  MutexLock lock(mutex_);
  launched_ = 0;
  unfinished_ = parameters_.replicas();
  ready_order_.clear();
}

void WorkerGradients::give(int replica, std::size_t slot, const at::Tensor& gradient) {
  slots_[slot].gradients[static_cast<std::size_t>(replica)] = gradient;
  slots_[slot].given[static_cast<std::size_t>(replica)] = 1;
  arrive(slot);
}

void WorkerGradients::finish(int replica, double weight) {
  weights_[static_cast<std::size_t>(replica)] = weight;
  for (const auto i : order_) {
    if (!given(replica, static_cast<std::size_t>(i))) arrive(static_cast<std::size_t>(i));
  }
  MutexLock lock(mutex_);
  if (--unfinished_ > 0) return;
  totals_ = {};
  for (const double part : weights_) totals_[0] += part;
  totals_[1] = totals_[0] > 0 ? 1 : 0;
  if (early()) tally_ = workers_.group().start(tally(), workers_.deadline());
}

Call WorkerGradients::tally() { return Call::all_reduce(buffer_of(std::span<double>(totals_)), ReduceOp::sum); }

Call WorkerGradients::reduction(const Bucket& bucket) {
  auto call = Call::all_reduce(bucket.buffer, ReduceOp::sum);
  call.tensors = bucket.names;
  return call;
}

void WorkerGradients::arrive(std::size_t index) {
  auto& slot = slots_[index];
  {
    MutexLock lock(mutex_);
    if (--slot.missing > 0) return;
  }
  if (early()) add_up(slot);
  MutexLock lock(mutex_);
  ready_order_.push_back(static_cast<std::int64_t>(index));
  --buckets_[slot.bucket].missing;
  while (early() && launched_ < buckets_.size() && buckets_[launched_].missing == 0) {
    auto& bucket = buckets_[launched_++];
    bucket.work = workers_.group().start(reduction(bucket), workers_.deadline());
  }
}

// Writes the sum of this process's gradients, and whether there are any, to the bucket.
void WorkerGradients::add_up(const Slot& slot) {
  const at::NoGradGuard no_grad;
  const auto& bucket = buckets_[slot.bucket];
  const auto add = [&]<class T>(T) {
    std::vector<const T*> parts;
    for (const auto& gradient : slot.gradients) {
      if (gradient.defined()) parts.push_back(gradient.const_data_ptr<T>());
    }
    if (parts.empty()) return false;
    const auto count = static_cast<std::size_t>(slot.sum.numel());
    sum_gradients<T>(parts, {.divide_by = scale_of(bucket)}, slot.sum.mutable_data_ptr<T>(), count);
    return true;
  };
  const bool any = slot.sum.scalar_type() == at::kDouble ? add(double()) : add(float());
  if (!any) slot.sent.zero_();
  if (any && bucket.shortened) slot.sent.copy_(slot.sum);
  slot.flag.fill_(any ? 1 : 0);
}

void WorkerGradients::wait() {
  const auto& group = workers_.group();
  if (early()) {
    for (auto& bucket : buckets_) bucket.work->wait();
    tally_->wait();
  } else {
    group.run(tally(), workers_.deadline());
    divided_by_ = totals_[0] > 0 ? totals_[0] : 1;
    for (auto& bucket : buckets_) {
      for (const auto i : bucket.slots) add_up(slots_[i]);
      group.run(reduction(bucket), workers_.deadline());
    }
  }
  for (auto& bucket : buckets_) receive(bucket);
}

void WorkerGradients::receive(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  if (bucket.shortened) bucket.sum.copy_(bucket.sent).mul_(scale_of(bucket) / divided_by_);
  const auto flags = bucket.flags.to(at::kFloat);
  for (std::size_t k = 0; k < bucket.slots.size(); ++k) {
    slots_[bucket.slots[k]].has_gradient = flags.const_data_ptr<float>()[k] > 0;
  }
}

bool WorkerGradients::finite() const {
  return std::all_of(buckets_.begin(), buckets_.end(),
                     [](const Bucket& bucket) { return at::isfinite(bucket.sum).all().item<bool>(); });
}

void WorkerGradients::end_step() {
  usual_weight_ = std::max(usual_weight_, totals_[0]);
  if (order_known_) return reset();
  std::vector<std::int64_t> order;
  {
    MutexLock lock(mutex_);
    order = ready_order_;
  }
  workers_.group().broadcast(buffer_of(std::span(order)), 0, workers_.deadline());
  restore({order, usual_weight_});
}

void WorkerGradients::restore(const Learnt& learnt) {
  const auto& order = learnt.order;
  if (!std::is_permutation(order.begin(), order.end(), order_.begin(), order_.end())) return;
  order_ = order;
  usual_weight_ = learnt.usual_weight;
  order_known_ = true;
  make_buckets();
}

}  // namespace lockstep
