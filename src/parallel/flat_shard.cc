#include "parallel/flat_shard.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "collective/backend.h"
#include "gradient/tensor_map.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/parameter_hook.h"
#include "ops/tensors.h"

namespace lockstep::parallel {
namespace {

gradient::FlatLayout layout_of(const std::vector<Tensor>& parameters, int ranks) {
  gradient::FlatLayout layout(parameters.at(0).scalar_type());
  for (std::size_t i = 0; i < parameters.size(); ++i) layout.add(i, parameters[i].numel());
  layout.pad_for(ranks);
  return layout;
}

std::shared_ptr<const gradient::Ownership> ownership_of(const gradient::FlatLayout& layout, at::ScalarType dtype,
                                                        const Communicator& ranks) {
  auto cut = layout.cut(ranks.size(), ops::dtype_of(dtype));
  return std::make_shared<gradient::Ownership>(ranks, std::move(cut.shards), /*replicas=*/1,
                                               gradient::Ownership::Writes::first_copy);
}

// Elements of a flat tensor as a tensor of its own: LibTorch refuses to detach views in place, which zero_grad does.
Tensor piece(const Tensor& flat, std::int64_t offset, at::IntArrayRef sizes) {
  auto* const address = static_cast<std::byte*>(flat.mutable_data_ptr()) + offset * flat.element_size();
  return at::from_blob(
      address, sizes, [flat](void*) {}, flat.options(), flat.device());
}

// A flat tensor in memory of its own: tensors of LibTorch's allocator have up to a quarter more.
Tensor exact(std::int64_t elements, at::ScalarType dtype) {
  const auto memory = collective::private_memory(static_cast<std::size_t>(elements) * at::elementSize(dtype));
  return at::from_blob(
      memory.get(), {elements}, [memory](void*) {}, at::TensorOptions(dtype));
}

// LibTorch's optimizers write through Tensor::data, whose version is another one; its dispatch key is the shard's.
class CountWrites final : public ops::ParameterHook {
 public:
  explicit CountWrites(std::shared_ptr<std::atomic<std::int64_t>> writes) : writes_(std::move(writes)) {}

  void before(const ops::OperatorCall& call, std::size_t i) override {
    if (call.writes(i) || call.is_set_data()) writes_->fetch_add(1, std::memory_order_relaxed);
  }

 private:
  const std::shared_ptr<std::atomic<std::int64_t>> writes_;
};

// Waits for what may have failed.
void settle(std::optional<Work>& work) {
  try {
    if (work) work->wait();
  } catch (const std::exception&) {  // which the training has seen, or will
  }
  work.reset();
}

struct KnownShard {
  Communicator ranks;
  std::shared_ptr<const PartialParameter> of;
};

// Never destroyed: an object of static storage may end later.
gradient::TensorMap<KnownShard>& known_shards() {
  static auto* const all = new gradient::TensorMap<KnownShard>;
  return *all;
}

}  // namespace

FlatShard::FlatShard(std::vector<std::string> names, std::vector<Tensor> parameters, const Communicator& ranks,
                     const Communicator& replicas, Precision precision, at::Device place)
    : names_(std::move(names)),
      parameters_(std::move(parameters)),
      ranks_(ranks),
      replicas_(replicas),
      dtype_(parameters_.at(0).scalar_type()),
      precision_(precision),
      device_(parameters_[0].device()),
      is_trained_(parameters_[0].requires_grad()),
      layout_(layout_of(parameters_, ranks_.size())),
      part_(layout_.numel() / ranks_.size()),
      ownership_(ownership_of(layout_, dtype_, ranks_)),
      taken_(parameters_.size()) {
  const at::NoGradGuard no_gradient;
  own_ = place.is_cpu() ? exact(part_, dtype_) : at::empty({part_}, at::device(place).dtype(dtype_));
  set_values(parameters_);
  bind();
}

void FlatShard::name_purposes(const std::string& of) {
  values_ = Purpose("the values of " + of);
  gather_ = Purpose("gathering " + of);
  sum_ = Purpose("the gradients of " + of);
}

// Runs a call whose buffers are of tensors on the device of `tensor`.
void FlatShard::run(Call call, const Tensor& tensor, const Communicator& among, Purpose purpose) const {
  call.purpose = purpose;
  among.group().run(on_stream_of(tensor, std::move(call)), among.deadline());
}

// A number that changes with every operator that writes a shard.
std::int64_t FlatShard::version() const {
  std::int64_t sum = 0;
  for (const auto& shard : shards_) sum += shard._version();
  return writes_ == nullptr ? sum : sum + writes_->load(std::memory_order_relaxed);
}

void FlatShard::count_writes(const std::shared_ptr<std::atomic<std::int64_t>>& writes) {
  writes_ = writes;
  const auto count = std::make_shared<CountWrites>(writes);
  for (const auto& shard : shards_) {
    if (shard.numel() > 0) ops::add_hook(shard, count);
  }
}

// The Group may be writing still, and the module may outlive this.
FlatShard::~FlatShard() {
  abandon_gather();
  settle(summing_);
  storage_.set_data_ptr(c10::DataPtr(nullptr, device_));
}

Tensor FlatShard::whole_flat(at::ScalarType dtype, at::Device device) const {
  return at::empty({layout_.numel()}, at::device(device).dtype(dtype));
}

Tensor FlatShard::own_piece(const Tensor& part, std::size_t i) const {
  const auto own = gradient::shard_of(ownership_->own().owned(), i);
  return piece(part, own.count > 0 ? layout_.places()[i].begin + own.begin - part_ * ranks_.rank() : 0, {own.count});
}

// This rank's part, where its shards lie now. It begins with the first of them that has elements.
const Tensor& FlatShard::own() {
  auto first = std::ranges::find_if(shards_, [](const auto& shard) { return shard.numel() > 0; });
  if (first == shards_.end() && !shards_.empty()) first = shards_.end() - 1;
  if (first == shards_.end()) return own_;  // which `bind` has not divided yet
  auto* const memory =
      static_cast<std::byte*>(first->storage().mutable_data()) + first->storage_offset() * first->element_size();
  if (memory == own_.mutable_data_ptr()) return own_;
  own_ = at::from_blob(
      memory, {part_}, [storage = first->storage()](void*) {}, own_.options(), own_.device());
  return own_;
}

// Makes the parameters views of a storage without memory, and the shards views of this rank's part.
void FlatShard::bind() {
  const auto keys = at::empty({0}, at::device(device_).dtype(dtype_)).key_set();
  storage_ = c10::Storage(c10::Storage::use_byte_size_t(),
                          static_cast<std::size_t>(layout_.numel()) * at::elementSize(precision_.gathered),
                          c10::DataPtr(nullptr, device_));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    auto view = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage_), keys,
                                                     at::scalarTypeToTypeMeta(precision_.gathered));
    view->set_storage_offset(layout_.places()[i].begin);
    view->set_sizes_contiguous(parameter.sizes());
    parameter.set_data(at::Tensor(std::move(view)));
    parameter.mutable_grad() = Tensor();
    shards_.push_back(own_piece(own_, i));
    shards_.back().set_requires_grad(parameter.requires_grad());
  }
}

void FlatShard::set_values(const std::vector<Tensor>& values) {
  const at::NoGradGuard no_gradient;
  const auto part = own();
  const auto whole = ranks_.rank() == 0 ? whole_flat(dtype_, part.device()) : at::empty({0}, part.options());
  for (std::size_t i = 0; ranks_.rank() == 0 && replicas_.rank() == 0 && i < parameters_.size(); ++i) {
    piece(whole, layout_.places()[i].begin, values[i].sizes()).copy_(values[i].detach());
  }
  run(Call::scatter(buffer_of(whole), buffer_of(part), 0), part, ranks_, values_);
  if (replicas_.size() > 1) run(Call::broadcast(buffer_of(part), 0), part, replicas_, values_);
}

// On a GPU gathers and sums are enqueued in the order of the current stream, and so is all that this object does with
// their memory. Work::wait has the stream wait, also for a call that failed, before the memory is given up. LibTorch's
// allocator gives such memory to the stream's later work alone. So nothing gets memory that is still read or written,
// though the host runs ahead.
void FlatShard::prepare_gather() {
  const at::NoGradGuard no_gradient;
  gathered_version_ = version();
  sent_ = own().to(device_, precision_.gathered);  // itself, where it is so
  whole_ = whole_flat(precision_.gathered, device_);
}

void FlatShard::start_gather() {
  if (is_gathered_ || gathering_) return;
  prepare_gather();
  auto call = on_stream_of(sent_, Call::all_gather(buffer_of(sent_), buffer_of(whole_)));
  call.purpose = gather_;
  gathering_ = ranks_.group().start(std::move(call), ranks_.deadline());
}

void FlatShard::check_unchanged() const {
  if ((!is_gathered_ && !gathering_) || version() == gathered_version_) return;
  throw Error(text("fully_shard: the shards of \"", names_[0],
                   "\" have changed since its values were gathered, which are old: call what fully_shard returned, "
                   "sharded(x) instead of sharded->forward(x), or release() before the forward"));
}

void FlatShard::finish_gather() {
  if (is_gathered_) return;
  if (gathering_) {
    std::exchange(gathering_, std::nullopt)->wait();
  } else {
    prepare_gather();
    run(Call::all_gather(buffer_of(sent_), buffer_of(whole_)), sent_, ranks_, gather_);
  }
  sent_ = Tensor();
  storage_.set_data_ptr(c10::DataPtr(whole_.mutable_data_ptr(), device_));
  is_gathered_ = true;
}

std::vector<Tensor> FlatShard::gather_values() {
  const auto part = own(), whole = whole_flat(dtype_, part.device());
  run(Call::all_gather(buffer_of(part), buffer_of(whole)), part, ranks_, values_);
  std::vector<Tensor> values;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto value = piece(whole, layout_.places()[i].begin, parameters_[i].sizes());
    values.push_back(value.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  }
  return values;
}

void FlatShard::release() {
  if (gathering_) {
    std::exchange(gathering_, std::nullopt)->wait();
    sent_ = whole_ = Tensor();
  }
  if (!is_gathered_) return;
  storage_.set_data_ptr(c10::DataPtr(nullptr, device_));
  whole_ = Tensor();
  is_gathered_ = false;
}

void FlatShard::abandon_gather() {
  settle(gathering_);
  if (!is_gathered_) whole_ = Tensor();
}

void FlatShard::check_frozen() const {
  if (is_trained_) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].requires_grad() && !shards_[i].requires_grad()) continue;
    throw InvalidArgument(
        text("fully_shard: ", names_[i],
             " was frozen when it was divided, and is to be trained now. Call set_requires_grad(true) "
             "before fully_shard, and freeze parameters after it"));
  }
}

void FlatShard::take_gradient(std::size_t i, double factor) {
  const at::NoGradGuard no_gradient;
  auto& gradient = parameters_[i].mutable_grad();
  if (!gradient.defined()) return;
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();  // an embedding's with `sparse`
  if (!gradients_.defined()) gradients_ = whole_flat(precision_.summed, device_);
  auto place = piece(gradients_, layout_.places()[i].begin, gradient.sizes());
  if (factor == 0) {  // of no examples, whose mean is no number
    if (!taken_[i]) place.zero_();
  } else if (taken_[i]) {
    place.add_(gradient.to(precision_.summed), factor);
  } else {
    at::mul_out(place, gradient.to(precision_.summed), at::scalar_tensor(factor, place.options()));
  }
  gradient = Tensor();
  taken_[i] = true;
}

void FlatShard::forget_gradients() {
  settle(summing_);
  for (const auto& parameter : parameters_) parameter.mutable_grad().reset();  // left by a backward that broke off
  gradients_ = sums_ = Tensor();
  taken_.assign(taken_.size(), false);
}

void FlatShard::start_sums() {
  const at::NoGradGuard no_gradient;
  if (!gradients_.defined()) gradients_ = whole_flat(precision_.summed, device_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!taken_[i]) piece(gradients_, layout_.places()[i].begin, {layout_.places()[i].numel}).zero_();
  }
  // Gradients of an earlier backward lie in the memory for sums.
  const bool accumulates = std::ranges::any_of(shards_, [](const auto& shard) { return shard.grad().defined(); });
  if (device_.is_cpu() && !memory_for_sums_.defined()) memory_for_sums_ = exact(part_, precision_.summed);
  sums_ = device_.is_cpu() && !accumulates ? memory_for_sums_ : at::empty({part_}, gradients_.options());
  auto call = on_stream_of(sums_, Call::reduce_scatter(buffer_of(gradients_), buffer_of(sums_), ReduceOp::sum));
  if (device_.is_cpu()) {  // whose cores compute the sums
    run(std::move(call), sums_, ranks_, sum_);
    sum_over_replicas();
  } else {
    call.purpose = sum_;
    summing_ = ranks_.group().start(std::move(call), ranks_.deadline());
  }
}

void FlatShard::finish_sums() {
  if (!summing_) return;
  std::exchange(summing_, std::nullopt)->wait();
  sum_over_replicas();
}

void FlatShard::sum_over_replicas() {
  gradients_ = Tensor();
  if (replicas_.size() > 1) run(Call::all_reduce(buffer_of(sums_), ReduceOp::sum), sums_, replicas_, sum_);
}

void FlatShard::set_gradients(const std::vector<bool>& taken_by_any) {
  const at::NoGradGuard no_gradient;
  const auto sums = sums_.to(own_.options());
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (shards_[i].numel() == 0 || !taken_by_any[i] || !shards_[i].requires_grad()) continue;
    const auto sum = own_piece(sums, i);
    auto& gradient = shards_[i].mutable_grad();
    gradient = gradient.defined() ? gradient.add_(sum) : sum;
  }
  sums_ = Tensor();
  taken_.assign(taken_.size(), false);
}

void know_shard(const Tensor& shard, const Communicator& ranks, std::shared_ptr<const PartialParameter> of) {
  known_shards().set(shard, {ranks, std::move(of)});
}

void forget_shard(const Tensor& shard) { known_shards().erase(shard); }

bool any_is_shard(const std::vector<Tensor>& tensors) {
  return std::ranges::any_of(tensors, [](const auto& tensor) { return known_shards().find(tensor).has_value(); });
}

bool any_is_shard_of(const std::vector<Tensor>& tensors, const Communicator& ranks) {
  const auto group = ranks.group().shared_backend();
  return std::ranges::any_of(tensors, [&](const auto& tensor) {
    const auto shard = known_shards().find(tensor);
    return shard && shard->ranks.group().shared_backend() == group;
  });
}

std::shared_ptr<const PartialParameter> partial_of_shard(const Tensor& tensor) {
  const auto shard = known_shards().find(tensor);
  return shard ? shard->of : nullptr;
}

}  // namespace lockstep::parallel
