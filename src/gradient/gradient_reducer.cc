#include "gradient/gradient_reducer.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>

#include "base/resources.h"
#include "base/text.h"
#include "gradient/dtypes.h"
#include "gradient/workers.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

DType dtype_of(const at::Tensor& parameter, const std::string& name) {
  try {
    return lockstep::dtype_of(parameter.scalar_type());
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(text("the parameter \"", name, "\": ", error.what()));
  }
}

constexpr const char* kUnequalSteps =
    "where ranks make unequal numbers of steps, run each rank's loop in DistributedDataParallel::join";

}  // namespace

// Where one parameter's gradient lies.
struct GradientReducer::Slot {
  std::size_t bucket = 0;
  at::Tensor sent;     // of the bucket's buffer, in the parameter's shape
  at::Tensor reduced;  // what the parameter gets: the same, or float32 where 16 bits are sent
  at::Tensor flag;     // one element
  bool ready = false;
};

struct GradientReducer::Bucket {
  GradientBucket shown;
  Memory memory;
  at::Tensor sent, reduced, flags;
  std::vector<std::size_t> parameters;
  std::shared_ptr<const std::string> names;  // for timelines
  std::size_t missing = 0;
  std::optional<Work> work;
};

class GradientReducer::Hook final : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(GradientReducer& reducer, std::size_t parameter) : reducer_(reducer), parameter_(parameter) {}
  void operator()(const at::Tensor&) override { reducer_.on_gradient(parameter_); }
  bool belongs_to(const GradientReducer& reducer) const { return &reducer_ == &reducer; }

 private:
  GradientReducer& reducer_;
  const std::size_t parameter_;
};

GradientReducer::GradientReducer(std::vector<std::string> names, std::vector<at::Tensor> parameters, Group group,
                                 GradientReducerOptions options)
    : names_(std::move(names)),
      parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(std::move(options)),
      overlap_(may_overlap(group_, group_.size() < usable_cpu_count())),
      slots_(parameters_.size()),
      order_(options_.order),
      tallies_(static_cast<std::size_t>(group_.size())) {
  if (parameters_.empty()) throw InvalidArgument("there is no parameter that requires a gradient");
  if (options_.wire && *options_.wire != DType::float16 && *options_.wire != DType::bfloat16) {
    throw InvalidArgument(
        text("gradients are sent as float16 or bfloat16, or as they are; not as ", name_of(*options_.wire)));
  }
  auto sorted = order_;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (sorted.size() == parameters_.size() && sorted[i] == static_cast<std::int64_t>(i)) continue;
    throw InvalidArgument(
        text("the order of ", order_.size(), " parameters is none of the ", parameters_.size(), " there are"));
  }
  order_known_ = !order_.empty();
  if (!order_known_) {  // backward goes from the last to the first, mostly
    order_.resize(parameters_.size());
    std::iota(order_.rbegin(), order_.rend(), 0);
  }
  make_buckets();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.push_back(
        parameters_[i].register_hook([this, i](const at::Tensor& gradient) { return weighed(i, gradient); }));
    torch::autograd::impl::set_post_acc_grad_hooks(parameters_[i], std::make_unique<Hook>(*this, i));
  }
}

GradientReducer::~GradientReducer() {
  // What was started works on memory of this object; only a pass that broke off leaves any.
  const auto end = [this](std::optional<Work>& work) {
    if (!work) return;
    group_.abort("a backward broke off in the middle");
    try {
      work->wait();
    } catch (const Error&) {
    }
  };
  end(tally_work_);
  for (auto& bucket : buckets_) end(bucket.work);
  for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].remove_hook(hooks_[i]);
  for (const auto& parameter : parameters_) {  // another reducer of the same parameters may have its hooks there by now
    const auto* const hook = dynamic_cast<Hook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
    if (hook != nullptr && hook->belongs_to(*this)) {
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
    }
  }
}

Deadline GradientReducer::deadline() const {
  return Deadline::after(std::chrono::duration<double>(options_.timeout_seconds));
}

// Fills buckets in order_, with parameters of one dtype each.
void GradientReducer::make_buckets() {
  buckets_.clear();
  std::vector<at::ScalarType> types;
  std::size_t bytes = 0;
  for (const auto index : order_) {
    const auto i = static_cast<std::size_t>(index);
    const auto type = parameters_[i].scalar_type();
    dtype_of(parameters_[i], names_[i]);
    const auto most = buckets_.size() <= 1 ? options_.first_bucket_bytes : options_.bucket_bytes;
    const auto own = parameters_[i].numel() * static_cast<std::int64_t>(parameters_[i].element_size());
    if (buckets_.empty() || types.back() != type || bytes + static_cast<std::size_t>(own) > most) {
      buckets_.emplace_back();
      types.push_back(type);
      bytes = 0;
    }
    bytes += static_cast<std::size_t>(own);
    buckets_.back().parameters.push_back(i);
    buckets_.back().shown.parameters.push_back(names_[i]);
    slots_[i].bucket = buckets_.size() - 1;
  }
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    auto& bucket = buckets_[b];
    const auto count = bucket.parameters.size();
    std::int64_t elements = 0;
    for (const auto i : bucket.parameters) elements += parameters_[i].numel();
    const auto type = types[b];
    const bool shortened = options_.wire && type == at::kFloat;
    const auto dtype = shortened ? *options_.wire : dtype_of(parameters_[bucket.parameters[0]], "");
    const auto total = static_cast<std::size_t>(elements) + count;
    bucket.memory = group_.allocate(total * size_of(dtype));
    bucket.names = std::make_shared<std::string>(first_of(bucket.shown.parameters));
    bucket.shown.index = static_cast<int>(b);
    bucket.shown.last = b + 1 == buckets_.size();
    bucket.shown.buffer = {bucket.memory.get(), total, dtype};
    bucket.missing = count;
    const auto whole = at::from_blob(
        bucket.memory.get(), {static_cast<std::int64_t>(total)}, [memory = bucket.memory](void*) {},
        at::TensorOptions(scalar_type_of(dtype)));
    bucket.sent = whole.narrow(0, 0, elements);
    bucket.flags = whole.narrow(0, elements, static_cast<std::int64_t>(count));
    bucket.reduced = shortened ? at::zeros({elements}, at::TensorOptions(type)) : bucket.sent;
    std::int64_t at = 0;
    for (std::size_t k = 0; k < count; ++k) {
      auto& slot = slots_[bucket.parameters[k]];
      const auto& parameter = parameters_[bucket.parameters[k]];
      // In the parameter's own order of memory where it has no gaps. Tensors of their own, not views of the bucket:
      // LibTorch refuses to detach those in place, which zero_grad does.
      const auto part = [&](const at::Tensor& flat) {
        auto* const place = static_cast<std::byte*>(flat.data_ptr()) + at * flat.element_size();
        const auto keep = [flat](void*) {};
        return parameter.is_non_overlapping_and_dense()
                   ? at::from_blob(place, parameter.sizes(), parameter.strides(), keep, flat.options())
                   : at::from_blob(place, parameter.sizes(), keep, flat.options());
      };
      slot.sent = part(bucket.sent);
      slot.reduced = part(bucket.reduced);
      slot.flag = bucket.flags.narrow(0, static_cast<std::int64_t>(k), 1);
      slot.ready = false;
      at += parameter.numel();
    }
  }
}

void GradientReducer::on_gradient(std::size_t parameter) {
  if (!sync_) return;
  auto& slot = slots_[parameter];
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward == accumulating_) return;
  if (!open_ && before_pass_ && !before_pass_()) {
    accumulating_ = backward;
    return;
  }
  if (!open_) {
    begin_pass();
    torch::autograd::Engine::get_default_engine().queue_callback([this] { finish_pass(); });
  }
  if (!slot.ready) {
    slot.ready = true;
    ready_order_.push_back(static_cast<std::int64_t>(parameter));
    --buckets_[slot.bucket].missing;
  }
  take(slot, parameters_[parameter].grad());
  if (overlap_) launch_ready(false);
}

void GradientReducer::require_whole() const {
  if (open_) {
    throw Error(
        "the last backward broke off in the middle, and the ranks are out of step: make a new Group, and wrap what you "
        "train anew");
  }
}

void GradientReducer::begin_pass() {
  open_ = true;
  launched_ = 0;
  ready_order_.clear();
  if (accumulated_.backwards == 0) accumulated_ = {1, weight_, weight_ > 0 ? weight_ : 1};  // gradients of its own
  my_tally_ = {accumulated_.weight / accumulated_.backwards, 1};
  if (usual_weight_ == 0) {  // nobody knows yet what a share is relative to
    exchange_tallies();
    usual_weight_ = sum_of_tallies().weight / sum_of_tallies().active;
  } else if (overlap_) {
    tally_work_ = group_.start(tally_call(), deadline());
  }
}

void GradientReducer::reduce_accumulated() {
  begin_pass();
  finish_pass();
}

Call GradientReducer::tally_call() {
  constexpr std::size_t kWords = sizeof(Tally) / sizeof(double);
  return Call::all_gather({&my_tally_, kWords, DType::float64},
                          {tallies_.data(), tallies_.size() * kWords, DType::float64});
}

void GradientReducer::exchange_tallies() {
  group_.run(tally_call(), deadline());
  tallied_ = true;
}

GradientReducer::Tally GradientReducer::sum_of_tallies() const {
  Tally sum{};
  for (const auto& tally : tallies_) {
    sum.weight += tally.weight;
    sum.active += tally.active;
  }
  return sum;
}

int GradientReducer::lowest_active() const {
  const auto first = std::find_if(tallies_.begin(), tallies_.end(), [](const auto& tally) { return tally.active > 0; });
  return static_cast<int>(first - tallies_.begin());
}

void GradientReducer::take(Slot& slot, const at::Tensor& gradient) {
  const at::NoGradGuard no_gradient;
  const auto dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
  const double share = usual_weight_ > 0 && my_tally_.weight > 0 ? accumulated_.unit / usual_weight_ : 0;
  if (share == 0) {  // no examples: what backward made of none counts for nothing
    slot.sent.zero_();
  } else if (share != 1) {
    slot.sent.copy_(dense * share);
  } else if (dense.data_ptr() != slot.sent.data_ptr()) {  // else backward added to what the last pass left there
    slot.sent.copy_(dense);
  }
  slot.flag.fill_(share > 0 ? 1 : 0);
}

// Starts buckets by index, as far as they are whole.
void GradientReducer::launch_ready(bool all) {
  while (launched_ < buckets_.size() && (all || buckets_[launched_].missing == 0)) {
    auto& bucket = buckets_[launched_++];
    for (const auto i : bucket.parameters) {
      auto& slot = slots_[i];
      if (slot.ready) continue;
      if (parameters_[i].grad().defined()) {  // not of this pass: accumulated without sync, or kept from the last
        take(slot, parameters_[i].grad());
      } else {
        slot.sent.zero_();
        slot.flag.zero_();
      }
    }
    auto call = Call::all_reduce(bucket.shown.buffer, ReduceOp::mean);
    call.tensors = bucket.names;
    if (options_.hook) {
      bucket.work = options_.hook(group_, bucket.shown, deadline());
    } else if (overlap_) {
      bucket.work = group_.start(call, deadline());
    } else {
      group_.run(call, deadline());
    }
  }
}

// A rank that made fewer steps has left, or waits elsewhere.
void GradientReducer::finish_pass() try { finish_reductions(); } catch (const PeerLost& lost) {
  throw PeerLost(lost.rank(), lost.generation(), text("(", lost.what(), ") ", kUnequalSteps));
} catch (const DeadlineExceeded& late) {
  throw DeadlineExceeded(late.operation(), late.waited_for(), late.ranks(), text("; ", kUnequalSteps));
}

void GradientReducer::finish_reductions() {
  const at::NoGradGuard no_gradient;
  if (tally_work_) {
    tally_work_->wait();
    tally_work_.reset();
  } else if (!tallied_) {
    exchange_tallies();
  }
  launch_ready(true);
  const auto sum = sum_of_tallies();
  // Buffers hold the mean over ranks of gradient * weight / usual weight.
  const double factor = sum.weight > 0 ? usual_weight_ * group_.size() / (options_.sum ? 1 : sum.weight) : 0;
  for (auto& bucket : buckets_) {
    if (bucket.work) bucket.work->wait();
    bucket.work.reset();
    write_back(bucket, factor);
  }
  if (sum.weight > 0) usual_weight_ = sum.weight / sum.active;
  open_ = false;
  tallied_ = false;
  accumulated_ = {};
  if (!order_known_) learn_order(lowest_active());
  if (after_pass_) after_pass_(lowest_active());
}

std::optional<int> GradientReducer::shadow_pass() {
  my_tally_ = {0, 0};
  exchange_tallies();
  const auto sum = sum_of_tallies();
  if (sum.active == 0) {
    tallied_ = false;
    return std::nullopt;
  }
  if (usual_weight_ == 0) usual_weight_ = sum.weight / sum.active;
  launched_ = 0;
  ready_order_.clear();
  finish_pass();
  return lowest_active();
}

// Gives the parameters of the bucket their gradients.
void GradientReducer::write_back(Bucket& bucket, double factor) {
  if (!bucket.reduced.is_same(bucket.sent)) bucket.reduced.copy_(bucket.sent);
  if (factor != 1) bucket.reduced.mul_(factor);
  const auto flags = bucket.flags.to(at::kFloat);
  for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
    auto& slot = slots_[bucket.parameters[k]];
    auto parameter = parameters_[bucket.parameters[k]];
    slot.ready = false;
    const bool used = options_.zeros_for_unused || flags.const_data_ptr<float>()[k] > 0;
    if (used && my_tally_.active > 0) {
      parameter.mutable_grad() = parameter.is_cpu() ? slot.reduced : slot.reduced.to(parameter.device());
    }
  }
  bucket.missing = bucket.parameters.size();
}

// From the lowest rank that had data: every rank gathers its buckets in the order of that one's backward.
void GradientReducer::learn_order(int root) {
  std::vector<std::int64_t> learnt = ready_order_;
  for (const auto i : order_) {
    if (std::find(learnt.begin(), learnt.end(), i) == learnt.end()) learnt.push_back(i);
  }
  group_.broadcast(buffer_of(std::span(learnt)), root, deadline());
  order_known_ = true;
  if (learnt == order_) return;
  order_ = learnt;
  make_buckets();
}

}  // namespace lockstep
