#include "parallel/flat_shard.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/dtypes.h"
#include "ops/parameter_hook.h"

namespace lockstep::parallel {
namespace {

constexpr std::int64_t kAlignment = 64;

std::int64_t rounded_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

}  // namespace

Memory BufferPool::take(std::size_t bytes) {
  const auto found = free_.find(bytes);
  auto memory = found == free_.end() ? ranks_.group().allocate(bytes) : std::move(free_.extract(found).mapped());
  auto* const address = memory.get();
  return {address, [pool = weak_from_this(), memory = std::move(memory), bytes](std::byte*) mutable {
            if (const auto alive = pool.lock()) alive->free_.emplace(bytes, std::move(memory));
          }};
}

FlatShard::FlatShard(std::vector<std::string> names, std::vector<Tensor> parameters, const Communicator& ranks,
                     const Communicator& replicas, std::shared_ptr<BufferPool> pool)
    : names_(std::move(names)),
      parameters_(std::move(parameters)),
      ranks_(ranks),
      replicas_(replicas),
      pool_(std::move(pool)),
      dtype_(parameters_.at(0).scalar_type()),
      taken_(parameters_.size()) {
  const at::NoGradGuard no_gradient;
  lay_out();
  own_ = ranks_.group().allocate(bytes_of(part_));
  set_values(parameters_);
  bind();
}

std::size_t FlatShard::bytes_of(std::int64_t elements) const {
  return static_cast<std::size_t>(elements) * at::elementSize(dtype_);
}

void FlatShard::lay_out() {
  const auto line = kAlignment / static_cast<std::int64_t>(at::elementSize(dtype_));
  std::int64_t end = 0;
  for (const auto& parameter : parameters_) {
    places_.push_back({end, parameter.numel()});
    end += rounded_up(parameter.numel(), line);
  }
  part_ = rounded_up(std::max<std::int64_t>(end, 1), line * ranks_.size()) / ranks_.size();
}

FlatShard::Place FlatShard::own_place(std::size_t i) const {
  const auto first = part_ * ranks_.rank();
  const auto begin = std::max(places_[i].offset, first);
  const auto end = std::min(places_[i].offset + places_[i].numel, first + part_);
  return {begin - first, std::max<std::int64_t>(end - begin, 0)};
}

Tensor FlatShard::tensor_on(const Memory& memory, std::int64_t offset, at::IntArrayRef sizes) const {
  return at::from_blob(
      memory.get() + bytes_of(offset), sizes, [memory](void*) {}, at::TensorOptions(dtype_));
}

// Makes the parameters views of a storage without memory, and the shards views of this rank's part.
void FlatShard::bind() {
  storage_ = c10::Storage(c10::Storage::use_byte_size_t(), bytes_of(elements()), c10::DataPtr(nullptr, at::kCPU));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    const auto hooks = ops::hooks_of(parameter);
    auto view = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage_), parameter.key_set(),
                                                     parameter.dtype());
    view->set_storage_offset(places_[i].offset);
    view->set_sizes_contiguous(parameter.sizes());
    parameter.set_data(at::Tensor(std::move(view)));
    parameter.mutable_grad() = Tensor();
    for (const auto& hook : hooks) ops::add_hook(parameter, hook);
    const auto own = own_place(i);
    shards_.push_back(own.numel == 0 ? Tensor() : tensor_on(own_, own.offset, {own.numel}));
    if (own.numel > 0) shards_.back().set_requires_grad(parameter.requires_grad());
  }
}

void FlatShard::set_values(const std::vector<Tensor>& values) {
  const auto whole = pool_->take(bytes_of(elements()));
  if (ranks_.rank() == 0 && replicas_.rank() == 0) {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      tensor_on(whole, places_[i].offset, values[i].sizes()).copy_(values[i].detach());
    }
  }
  const auto dtype = ops::dtype_of(dtype_);
  const auto count = static_cast<std::size_t>(part_);
  ranks_.group().run(Call::scatter({whole.get(), count * static_cast<std::size_t>(ranks_.size()), dtype},
                                   {own_.get(), count, dtype}, 0),
                     ranks_.deadline());
  replicas_.group().broadcast({own_.get(), count, dtype}, 0, replicas_.deadline());
}

void FlatShard::start_gather() {
  if (is_gathered_ || gathering_) return;
  whole_ = pool_->take(bytes_of(elements()));
  const auto dtype = ops::dtype_of(dtype_);
  const auto count = static_cast<std::size_t>(part_);
  gathering_ =
      ranks_.group().start(Call::all_gather({own_.get(), count, dtype},
                                            {whole_.get(), count * static_cast<std::size_t>(ranks_.size()), dtype}),
                           ranks_.deadline());
}

void FlatShard::finish_gather() {
  if (is_gathered_) return;
  if (gathering_) {
    std::exchange(gathering_, std::nullopt)->wait();
  } else {
    whole_ = pool_->take(bytes_of(elements()));
    ranks_.group().all_gather({own_.get(), static_cast<std::size_t>(part_), ops::dtype_of(dtype_)},
                              {whole_.get(), static_cast<std::size_t>(elements()), ops::dtype_of(dtype_)},
                              ranks_.deadline());
  }
  storage_.set_data_ptr(c10::DataPtr(whole_.get(), at::kCPU));
  is_gathered_ = true;
}

Tensor FlatShard::value(std::size_t i) const { return tensor_on(whole_, places_[i].offset, parameters_[i].sizes()); }

void FlatShard::release() {
  if (gathering_) finish_gather();
  if (!is_gathered_) return;
  storage_.set_data_ptr(c10::DataPtr(nullptr, at::kCPU));
  whole_ = nullptr;
  is_gathered_ = false;
}

void FlatShard::take_gradient(std::size_t i, double factor) {
  const at::NoGradGuard no_gradient;
  auto& gradient = parameters_[i].mutable_grad();
  if (!gradient.defined()) return;
  if (gradients_ == nullptr) gradients_ = pool_->take(bytes_of(elements()));
  auto place = tensor_on(gradients_, places_[i].offset, gradient.sizes());
  if (taken_[i]) {
    place.add_(gradient, factor);
  } else {
    at::mul_out(place, gradient, at::scalar_tensor(factor, gradient.options()));
  }
  gradient = Tensor();
  taken_[i] = true;
}

void FlatShard::reduce_gradients() {
  const at::NoGradGuard no_gradient;
  if (gradients_ == nullptr) gradients_ = pool_->take(bytes_of(elements()));
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (!taken_[i]) tensor_on(gradients_, places_[i].offset, {places_[i].numel}).zero_();
  }
  sums_ = pool_->take(bytes_of(part_));
  const auto dtype = ops::dtype_of(dtype_);
  const Buffer own{sums_.get(), static_cast<std::size_t>(part_), dtype};
  ranks_.group().reduce_scatter({gradients_.get(), static_cast<std::size_t>(elements()), dtype}, own, ReduceOp::sum,
                                ranks_.deadline());
  if (replicas_.size() > 1) replicas_.group().all_reduce(own, ReduceOp::sum, replicas_.deadline());
  gradients_ = nullptr;
}

void FlatShard::set_gradients(const std::vector<bool>& taken_by_any) {
  const at::NoGradGuard no_gradient;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const auto own = own_place(i);
    if (own.numel == 0 || !taken_by_any[i]) continue;
    const auto sum = tensor_on(sums_, own.offset, {own.numel});
    auto& gradient = shards_[i].mutable_grad();
    gradient = gradient.defined() ? gradient.add_(sum) : sum;
  }
  sums_ = nullptr;  // which gradients keep
  taken_.assign(taken_.size(), false);
}

}  // namespace lockstep::parallel
