#include "gradient/buckets.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/all.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>

#include <c10/core/Event.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/tensors.h"

namespace lockstep::gradient {
namespace {

// Default bucket sizes: the model's size / kBuckets, within these bounds. Small buckets overlap better with backward,
// but each has a fixed cost.
constexpr std::size_t kBuckets = 16, kSmallest = 1 << 20, kLargest = 25 << 20;

// Reduction in shared memory runs on this host's cores: overlapping it with backward helps only where some are idle.
bool may_overlap(const Group& group, bool idle_cores) {
  return idle_cores || (group.backend() != "shm" && group.backend() != "threads");
}

bool is_half(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

// The current stream of a GPU's tensor in this thread; backward's threads have streams of their own.
std::optional<c10::Stream> stream_of(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return std::nullopt;
  return c10::impl::getDeviceGuardImpl(c10::kCUDA)->getStream(tensor.device());
}

// Later work of `stream` waits for all that `other` has by now.
void wait_for(const c10::Stream& stream, const c10::Stream& other) {
  if (stream == other) return;
  c10::Event event(c10::kCUDA);
  event.record(other);
  event.block(stream);
}

std::vector<std::int64_t> all_slots(std::size_t count) {  // backward goes from the last to the first, mostly
  std::vector<std::int64_t> order(count);
  std::iota(order.rbegin(), order.rend(), 0);
  return order;
}

}  // namespace

Buckets::Buckets(std::vector<BucketSlot> slots, Communicator ranks, BucketOptions options)
    : ranks_(std::move(ranks)),
      options_(std::move(options)),
      infos_(std::move(slots)),
      group_(ranks_.group()),
      regroups_(ranks_.regroups()),
      order_(all_slots(infos_.size())),
      slots_(infos_.size()) {
  const auto& wanted = options_.gradient_dtype;
  if (wanted && !is_half(*wanted) && *wanted != DType::int8) {
    throw InvalidArgument(
        text("gradients are sent as float16, bfloat16 or int8, or as they are; not as ", name_of(*wanted)));
  }
  for (const auto& slot : infos_) {
    try {
      ops::dtype_of(slot.dtype);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(text("the parameter \"", slot.name, "\": ", error.what()));
    }
  }
  const auto& order = options_.order;
  if (!order.empty() && !std::ranges::is_permutation(order, order_)) {
    throw InvalidArgument(
        text("the order of ", order.size(), " parameters is none of the ", order_.size(), " there are"));
  }
  knows_order_ = options_.scatter || !order.empty();
  if (!order.empty()) order_ = order;
  find_overlap();
  name_anew();
  make();
}

Buckets::~Buckets() { end_pending(); }

bool Buckets::rebuild_after_regroup(const std::function<at::Device()>& find_device) {
  if (regroups_ == ranks_.regroups()) return false;
  end_pending();
  if (find_device) {
    const auto device = find_device();
    for (auto& slot : infos_) slot.device = device;
  }
  regroups_ = ranks_.regroups();
  group_ = ranks_.group();
  weights_ = {};
  // Ranks may disagree on the order: the last pass may have ended well on one rank and failed on another.
  std::vector<std::int64_t> of_rank_0 = order_;
  of_rank_0.push_back(knows_order_ ? 1 : 0);
  group_.broadcast(buffer_of(std::span(of_rank_0)), 0, ranks_.deadline());
  knows_order_ = of_rank_0.back() != 0;
  of_rank_0.pop_back();
  order_ = of_rank_0;
  find_overlap();
  name_anew();
  make();
  return true;
}

// NCCL's reductions do not use this host's cores.
void Buckets::find_overlap() {
  const bool all_on_gpus = std::ranges::all_of(infos_, [](const auto& slot) { return slot.device.is_cuda(); });
  overlaps_ = ranks_.all(all_on_gpus || may_overlap(group_, options_.idle_cores));
}

// Reductions under way use this object's memory; only a pass that failed leaves any.
void Buckets::end_pending() {
  const auto end = [this](std::optional<Work>& work) {
    if (!work) return;
    try {
      if (work->done()) return;
      group_.abort("a step broke off in the middle");
      work->wait();
    } catch (const Error&) {
    }
  };
  end(weights_.pending());
  for (auto& bucket : buckets_) end(bucket.work);
}

// All ranks make the objects that share a Group in one order, so their numbers agree.
void Buckets::name_anew() {
  name_ = text(options_.called, " ", group_.next_number() + 1);
  ordering_ = Purpose("the order of the buckets of " + name_);
  weights_.name(name_);
}

void Buckets::make() {
  ++layout_;
  buckets_.clear();
  for (auto& slots : slots_of_buckets()) buckets_.push_back(make_bucket(std::move(slots)));
  start_pass();
}

// Assigns the slots to buckets in order_; the slots of a bucket have one dtype and one device.
std::vector<std::vector<std::size_t>> Buckets::slots_of_buckets() const {
  const auto bytes_of = [this](std::size_t slot) {
    return static_cast<std::size_t>(infos_[slot].numel) * at::elementSize(infos_[slot].dtype);
  };
  std::size_t all = 0;
  for (std::size_t i = 0; i < infos_.size(); ++i) all += bytes_of(i);
  const bool by_size = options_.bucket_bytes == 0;
  const auto later = by_size ? std::clamp(all / kBuckets, kSmallest, kLargest) : options_.bucket_bytes;
  std::vector<std::vector<std::size_t>> buckets;
  std::size_t bytes = 0;
  for (const auto index : order_) {
    const auto slot = static_cast<std::size_t>(index);
    // Without overlap one bucket is best.
    const auto most = by_size && !overlaps_ ? all : buckets.size() <= 1 ? options_.first_bucket_bytes : later;
    const bool together = !buckets.empty() && infos_[buckets.back()[0]].dtype == infos_[slot].dtype &&
                          infos_[buckets.back()[0]].device == infos_[slot].device &&
                          (!options_.scatter || infos_[buckets.back().back()].follows);
    if (!together || bytes + bytes_of(slot) > most) {
      buckets.emplace_back();
      bytes = 0;
    }
    bytes += bytes_of(slot);
    buckets.back().push_back(slot);
  }
  return buckets;
}

Buckets::Bucket Buckets::make_bucket(std::vector<std::size_t> slots) {
  if (options_.scatter) std::ranges::sort(slots);  // in the order of the flat parameters
  Bucket bucket;
  const auto type = infos_[slots[0]].dtype;
  FlatLayout layout(type, /*aligned=*/options_.scatter);  // scattered ones lie as the flat parameters do
  for (const auto slot : slots) {
    layout.add(slot, infos_[slot].numel);
    bucket.shown.parameters.push_back(infos_[slot].name);
  }
  const auto elements = layout.numel();
  const bool in_16_bits = options_.gradient_dtype && is_half(*options_.gradient_dtype) && type == at::kFloat;
  const auto dtype = in_16_bits ? *options_.gradient_dtype : ops::dtype_of(type);
  const auto count = static_cast<std::int64_t>(slots.size());
  bucket.names = std::make_shared<std::string>(first_of(bucket.shown.parameters));
  bucket.purpose = Purpose(text("bucket ", buckets_.size(), " (", *bucket.names, ") of ", name_));
  const auto options = at::TensorOptions(ops::scalar_type_of(dtype)).device(infos_[slots[0]].device);
  if (options.device().is_cuda()) {
    bucket.memory = at::zeros({elements + count}, options);  // as `allocate`: int8 rounds what is between slots, too
  } else {
    const auto memory = group_.allocate(static_cast<std::size_t>(elements + count) * size_of(dtype));
    bucket.memory = at::from_blob(
        memory.get(), {elements + count}, [memory](void*) {}, options);
  }
  bucket.shown.index = static_cast<int>(buckets_.size());
  bucket.shown.buffer = buffer_of(bucket.memory);
  bucket.input = bucket.memory.narrow(0, 0, elements);
  bucket.flags = bucket.memory.narrow(0, elements, count);
  bucket.mean = in_16_bits ? at::empty({elements}, options.dtype(type)) : bucket.input;
  bucket.own = {0, static_cast<std::size_t>(elements)};
  if (options_.scatter) {
    bucket.cut = layout.cut(group_.size(), dtype);
    bucket.own = collective::share_of(bucket.cut.counts, 0, group_.rank());
  }
  if (options_.gradient_dtype == DType::int8 && type == at::kFloat) {
    const auto device = options.device();
    bucket.in_8_bits = options_.scatter
                           ? std::make_unique<EightBitMean>(group_.rank(), bucket.cut.counts, device)
                           : std::make_unique<EightBitMean>(group_.rank(), elements, group_.size(), device);
  }
  for (std::size_t k = 0; k < slots.size(); ++k) {
    const auto& place = layout.places()[k];
    auto& slot = slots_[place.slot];
    slot.bucket = buckets_.size();
    slot.input = bucket.input.narrow(0, place.begin, place.numel);
    slot.mean = bucket.mean.narrow(0, place.begin, place.numel);
    slot.flag = bucket.flags.narrow(0, static_cast<std::int64_t>(k), 1);
  }
  bucket.slots = std::move(slots);
  return bucket;
}

std::vector<ScatteredBucket> Buckets::scattered() const {
  std::vector<ScatteredBucket> scattered;
  for (auto bucket = buckets_.rbegin(); bucket != buckets_.rend(); ++bucket)
    scattered.push_back({bucket->slots.front(), bucket->cut, bucket->mean});
  return scattered;
}

void Buckets::start_pass() {
  MutexLock lock(mutex_);
  launched_ = 0;
  ready_order_.clear();
  for (auto& slot : slots_) slot.ready = false;
  for (auto& bucket : buckets_) {
    bucket.missing = bucket.slots.size();
    bucket.shown.last = &bucket == &buckets_.back();
    bucket.flags_are_read = false;
    bucket.work.reset();
    bucket.streams.clear();
  }
}

void Buckets::mark_ready(std::size_t index, bool has_gradient) {
  auto& slot = slots_[index];
  slot.flag.fill_(has_gradient ? 1 : 0);
  slot.has_gradient = has_gradient;
  slot.ready = true;
  MutexLock lock(mutex_);
  if (const auto stream = stream_of(slot.flag)) buckets_[slot.bucket].streams.push_back(*stream);
  ready_order_.push_back(static_cast<std::int64_t>(index));
  --buckets_[slot.bucket].missing;
  while (overlaps_ && launched_ < buckets_.size() && buckets_[launched_].missing == 0) launch(buckets_[launched_++]);
}

void Buckets::launch(Bucket& bucket) {
  const auto stream = stream_of(bucket.memory);
  for (const auto& filled_by : bucket.streams) wait_for(*stream, filled_by);
  if (stream) bucket.streams = {*stream};  // of the reduction
  bucket.shown.stream = on_stream_of(bucket.memory, {}).stream;
  if (options_.hook) {
    bucket.work = options_.hook(group_, bucket.shown, ranks_.deadline());
    return;
  }
  if (bucket.in_8_bits) {
    bucket.work = start_in_8_bits(bucket);
    return;
  }
  auto calls = calls_of(bucket);
  for (auto& call : calls) describe(bucket, call);
  if (overlaps_) {
    bucket.work = group_.start(std::move(calls), ranks_.deadline());
  } else {
    group_.run(calls, ranks_.deadline());
  }
}

void Buckets::describe(const Bucket& bucket, Call& call) const {
  call.tensors = bucket.names;
  call.purpose = bucket.purpose;
  call.stream = bucket.shown.stream;
}

// The elements of slots without a gradient on any rank, when the flags are reduced. No flag is read where this rank has
// a gradient of every parameter.
std::vector<EightBitMean::Elements> Buckets::idle_in(const Bucket& bucket) const {
  if (std::ranges::all_of(bucket.slots, [this](std::size_t slot) { return slots_[slot].has_gradient; })) return {};
  const auto flags = bucket.flags.cpu();
  std::vector<EightBitMean::Elements> idle;
  for (std::size_t k = 0; k < bucket.slots.size(); ++k) {
    if (flags.const_data_ptr<float>()[k] > 0) continue;
    const auto& input = slots_[bucket.slots[k]].input;
    idle.push_back({input.storage_offset() - bucket.input.storage_offset(), input.numel()});
  }
  return idle;
}

Work Buckets::start_in_8_bits(const Bucket& bucket) const {
  const auto reduce = [this, &bucket](const Group::RunCalls& run) {
    const auto run_described = [&](std::vector<Call> calls) {
      for (auto& call : calls) describe(bucket, call);
      run(calls);
    };
    run_described({Call::all_reduce(buffer_of(bucket.flags), ReduceOp::mean)});
    bucket.in_8_bits->reduce(bucket.input, /*gathers=*/!options_.scatter, run_described, idle_in(bucket));
  };
  return group_.start(reduce, bucket.shown.buffer.device, ranks_.deadline());
}

std::vector<Call> Buckets::calls_of(const Bucket& bucket) const {
  const auto& whole = bucket.shown.buffer;
  if (!options_.scatter) return {Call::all_reduce(whole, ReduceOp::mean)};
  const auto part = [&](const at::Tensor& of, const collective::Slice& range) {
    return Buffer{
        of.narrow(0, static_cast<std::int64_t>(range.begin), static_cast<std::int64_t>(range.count())).data_ptr(),
        range.count(), whole.dtype, whole.device};
  };
  const auto gradients = part(bucket.input, {0, static_cast<std::size_t>(bucket.input.numel())});
  return {Call::reduce_scatter(gradients, part(bucket.input, bucket.own), ReduceOp::mean, bucket.cut.counts),
          Call::all_reduce(part(bucket.flags, {0, bucket.slots.size()}), ReduceOp::mean)};
}

void Buckets::finish() {
  if (!overlaps_) {
    for (auto& bucket : buckets_) launch(bucket);
  }
  for (auto& bucket : buckets_) {
    if (bucket.work) bucket.work->wait();
    for (const auto& reduced_in : bucket.streams) wait_for(*stream_of(bucket.memory), reduced_in);
    receive(bucket);
  }
}

at::Tensor Buckets::own_part(const Bucket& bucket, const at::Tensor& of) {
  return of.narrow(0, static_cast<std::int64_t>(bucket.own.begin), static_cast<std::int64_t>(bucket.own.count()));
}

void Buckets::receive(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  if (!bucket.mean.is_same(bucket.input)) own_part(bucket, bucket.mean).copy_(own_part(bucket, bucket.input));
}

// Flags are read only where they are asked for: the host would wait for them.
bool Buckets::has_gradient(std::size_t slot) {
  auto& bucket = buckets_[slots_[slot].bucket];
  if (!slots_[slot].has_gradient && !std::exchange(bucket.flags_are_read, true)) {
    const auto flags = bucket.flags.to(at::TensorOptions(at::kCPU).dtype(at::kFloat));
    for (std::size_t k = 0; k < bucket.slots.size(); ++k) {
      slots_[bucket.slots[k]].has_gradient = flags.const_data_ptr<float>()[k] > 0;
    }
  }
  return slots_[slot].has_gradient;
}

void Buckets::multiply(double factor) {
  const at::NoGradGuard no_grad;
  if (factor == 1) return;
  for (auto& bucket : buckets_) bucket.mean.mul_(factor);
}

bool Buckets::all_finite() const {
  const bool own = std::ranges::all_of(
      buckets_, [](const Bucket& bucket) { return at::isfinite(own_part(bucket, bucket.mean)).all().item<bool>(); });
  return options_.scatter ? ranks_.all(own) : own;
}

void Buckets::end_pass(int root) {
  weights_.end_pass();
  if (!knows_order_) {
    std::vector<std::int64_t> order;
    {
      MutexLock lock(mutex_);
      order = ready_order_;
    }
    order.resize(order_.size());
    auto call = Call::broadcast(buffer_of(std::span(order)), root);
    call.purpose = ordering_;
    group_.run(call, ranks_.deadline());
    restore_order(order);
  }
  start_pass();
}

void Buckets::restore_order(const std::vector<std::int64_t>& order) {
  if (options_.scatter || !std::ranges::is_permutation(order, order_)) return;
  knows_order_ = true;
  if (order == order_) return;
  order_ = order;
  if (regroups_ == ranks_.regroups()) make();
}

}  // namespace lockstep::gradient
