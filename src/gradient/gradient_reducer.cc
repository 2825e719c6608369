#include "gradient/gradient_reducer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/any.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::gradient {
namespace {

constexpr const char* kUnequalSteps =
    "where ranks make unequal numbers of steps, run each rank's loop in DistributedDataParallel::join";

std::vector<BucketSlot> slots_of(const std::vector<std::string>& names, const std::vector<at::Tensor>& parameters,
                                 const Communicator& ranks) {
  if (parameters.empty()) throw InvalidArgument("there is no parameter that requires a gradient");
  const auto device = device_of_sums(ranks, parameters);
  std::vector<BucketSlot> slots;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    slots.push_back(
        {.name = names[i], .dtype = parameters[i].scalar_type(), .numel = parameters[i].numel(), .device = device});
  }
  return slots;
}

}  // namespace

GradientReducer::GradientReducer(const std::vector<std::string>& names, std::vector<at::Tensor> parameters,
                                 Communicator ranks, const GradientReducerOptions& options)
    : names_(names),
      parameters_(std::move(parameters)),
      sum_(options.sum),
      zeros_for_unused_(options.zeros_for_unused),
      buckets_(slots_of(names, parameters_, ranks), ranks, options.buckets),
      weights_(options.weights),
      summed_(parameters_.size()),
      kept_(parameters_.size()) {
  make_views();
  weights_.add_parameters(parameters_);
  std::map<const c10::TensorImpl*, std::size_t> last;
  for (std::size_t i = 0; i < parameters_.size(); ++i) last[parameters_[i].unsafeGetTensorImpl()] = i;
  for (const auto& [parameter, i] : last) distinct_.push_back(i);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    before_accumulation_.push_back(
        parameters_[i].register_hook([this, i](const at::Tensor& gradient) { return weighed(i, gradient); }));
    after_accumulation_.emplace_back(parameters_[i], [this, i] { on_gradient(i); });
  }
}

GradientReducer::~GradientReducer() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].remove_hook(before_accumulation_[i]);
}

// Makes views with the parameter's strides where the parameter is dense. These are tensors on the bucket's memory and
// not views of its tensor: LibTorch refuses to detach views in place, which zero_grad does.
void GradientReducer::make_views() {
  if (layout_ == buckets_.layout()) return;
  layout_ = buckets_.layout();
  const auto shaped = [](const at::Tensor& flat, const at::Tensor& parameter) {
    const auto strides = parameter.is_non_overlapping_and_dense() ? c10::DimVector(parameter.strides())
                                                                  : c10::contiguous_strides(parameter.sizes());
    return at::from_blob(
        flat.data_ptr(), parameter.sizes(), strides, [flat](void*) {}, flat.options(), flat.device());
  };
  inputs_.clear();
  means_.clear();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    inputs_.push_back(shaped(buckets_.input(i), parameters_[i]));
    means_.push_back(shaped(buckets_.mean(i), parameters_[i]));
  }
}

// A later wrapper of the same parameters takes their gradients. That wrapper was made anew in the place of this one, or
// wraps another module that shares a parameter.
void GradientReducer::require_gradients() const {
  for (const auto i : distinct_) {
    if (after_accumulation_[i].is_in_place()) continue;
    throw InvalidArgument(text("the gradients of the parameter \"", names_[i],
                               "\" are taken by another DistributedDataParallel or DistributedOptimizer that was made "
                               "later: use that one; modules that share a parameter are one module to be wrapped"));
  }
}

bool GradientReducer::prepare() {
  require_gradients();
  if (buckets_.rebuild_after_regroup([this] { return device_of_sums(buckets_.ranks(), parameters_); })) {
    make_views();
    open_ = false;
    accumulated_ = {};
    return true;
  }
  if (!open_) return false;
  throw Error(
      "the last backward broke off in the middle, and the ranks are out of step: make a new Group, and wrap what you "
      "train anew");
}

// Called for each gradient of a backward before it is added to those that have accumulated: multiplies it by the
// backward's weight.
at::Tensor GradientReducer::weighed(std::size_t parameter, const at::Tensor& gradient) {
  if (!gradient.defined() || !accumulates(parameters_[parameter]) || !after_accumulation_[parameter].is_in_place())
    return gradient;
  if (const int backward = torch::autograd::get_current_graph_task_id(); backward != backward_) {
    begin_backward();
    backward_ = backward;
  }
  const double scale = weight_ / accumulated_.unit;
  if (scale == 1) return gradient;
  return scale == 0 ? at::zeros_like(gradient) : gradient * scale;
}

void GradientReducer::begin_backward() {
  weight_ = weights_.of_this_backward();
  if (accumulated_.backwards > 0 && are_cleared()) accumulated_ = {};
  if (sum_ && accumulated_.backwards == 0) keep_sums();
  if (accumulated_.backwards++ == 0) accumulated_.unit = weight_ > 0 ? weight_ : 1;
  accumulated_.weight += weight_;
}

// True where zero_grad has cleared what has accumulated. Zeros alone do not tell: a backward without examples leaves
// them too, but then nobody has written the gradients since.
bool GradientReducer::are_cleared() const {
  const auto& last = parameters_[accumulated_.last].grad();
  const bool is_as_left =
      last.unsafeGetTensorImpl() == accumulated_.gradient && last._version() == accumulated_.version;
  if (is_as_left) return false;
  const auto is_left = [](const at::Tensor& parameter) {
    return parameter.grad().defined() &&
           at::any(parameter.grad().is_sparse() ? parameter.grad().to_dense() : parameter.grad()).item<bool>();
  };
  return std::ranges::none_of(parameters_, is_left);
}

// The sums that a pass left on parameters are the same on all ranks. Were they summed again, they would count once a
// rank. So the next pass's sums are added to them.
void GradientReducer::keep_sums() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& gradient = parameters_[i].mutable_grad();
    kept_[i].reset();
    if (!gradient.defined() || !gradient.is_same(summed_[i])) continue;
    kept_[i] = gradient.clone();  // the next pass overwrites the bucket
    gradient.reset();
  }
}

// True where the backward that runs comes before the pass.
bool GradientReducer::only_accumulates() {
  if (!sync_) return true;
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward != accumulating_ && !open_ && before_pass_ && !before_pass_()) accumulating_ = backward;
  return backward == accumulating_;
}

void GradientReducer::on_gradient(std::size_t parameter) {
  if (only_accumulates()) {
    const auto& gradient = parameters_[parameter].grad();
    if (gradient.defined()) {
      accumulated_.last = parameter;
      accumulated_.gradient = gradient.unsafeGetTensorImpl();
      accumulated_.version = gradient._version();
    }
    return;
  }
  if (!open_) {
    begin_pass();
    torch::autograd::Engine::get_default_engine().queue_callback([this] { finish_pass(); });
  }
  take(parameter);
}

void GradientReducer::begin_pass() {
  open_ = has_data_ = wants_gradients_ = true;
  if (accumulated_.backwards == 0) {  // no backward ran
    if (sum_) keep_sums();
    accumulated_ = {.backwards = 1, .weight = weight_, .unit = weight_ > 0 ? weight_ : 1};
  }
  auto& weights = buckets_.weights();
  const bool scale_known = weights.scale() > 0;
  weights.announce(buckets_.ranks(), accumulated_.weight / accumulated_.backwards, true,
                   scale_known && buckets_.overlaps());
  if (!scale_known) weights.wait(buckets_.ranks());
  scale_ = weights.scale();
}

void GradientReducer::reduce_accumulated() {
  begin_pass();
  finish_pass();
}

// Copies the parameter's gradient to its bucket and marks it ready.
void GradientReducer::take(std::size_t parameter) {
  const at::NoGradGuard no_gradient;
  const auto& input = inputs_[parameter];
  const auto& gradient = parameters_[parameter].grad();
  const double share = has_data_ && scale_ > 0 && accumulated_.weight > 0 ? accumulated_.unit / scale_ : 0;
  const bool counts = share > 0 && gradient.defined();  // gradients of a backward with weight 0 do not count
  if (!counts) {
    input.zero_();
  } else {
    const auto dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
    if (share != 1) {
      input.copy_(dense * share);
    } else if (dense.data_ptr() != input.data_ptr()) {  // else the gradient lies in the bucket already
      input.copy_(dense);
    }
  }
  if (!buckets_.is_ready(parameter)) buckets_.mark_ready(parameter, counts);
}

// Adds a likely cause to the error: a rank that made fewer steps has left, or waits elsewhere.
void GradientReducer::finish_pass() try { finish_reductions(); } catch (const PeerLost& lost) {
  throw PeerLost(lost.rank(), lost.generation(), text(lost.how(), "; ", kUnequalSteps));
} catch (const DeadlineExceeded& late) {
  throw DeadlineExceeded(late.operation(), late.waited_for(), late.ranks(), text("; ", kUnequalSteps));
}

void GradientReducer::finish_reductions() {
  auto& weights = buckets_.weights();
  weights.wait(buckets_.ranks());
  const auto order = buckets_.order();
  for (const auto i : order) {  // those that this backward did not reach; earlier ones may have
    const auto parameter = static_cast<std::size_t>(i);
    if (!buckets_.is_ready(parameter)) take(parameter);
  }
  buckets_.finish();
  // Buckets hold the mean over ranks of gradient * weight / scale.
  const double divide_by = sum_ ? 1 : weights.total();
  buckets_.multiply(weights.total() > 0 ? scale_ * buckets_.ranks().size() / divide_by : 0);
  if (wants_gradients_) write_back();
  open_ = false;
  accumulated_ = {};
  const int root = weights.lowest_with_gradients();
  buckets_.end_pass(root);
  make_views();
  if (after_pass_) after_pass_(root);
}

std::optional<int> GradientReducer::shadow_pass(bool wants_gradients) {
  auto& weights = buckets_.weights();
  weights.announce(buckets_.ranks(), 0, false, false);
  weights.wait(buckets_.ranks());
  if (!weights.any_has_gradients()) return std::nullopt;
  has_data_ = false;
  wants_gradients_ = wants_gradients;
  scale_ = weights.scale();
  finish_pass();
  return weights.lowest_with_gradients();
}

// Makes the means the parameters' gradients.
void GradientReducer::write_back() {
  const at::NoGradGuard no_gradient;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!zeros_for_unused_ && !buckets_.has_gradient(i)) continue;
    const auto& mean = means_[i];
    auto& gradient = parameters_[i].mutable_grad();
    gradient = parameters_[i].is_cpu() ? mean : mean.to(parameters_[i].device());
    if (!sum_) continue;
    if (kept_[i].defined()) gradient.add_(std::exchange(kept_[i], {}));
    summed_[i] = gradient;
  }
}

}  // namespace lockstep::gradient
