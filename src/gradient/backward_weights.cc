#include "gradient/backward_weights.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "base/hash.h"
#include "base/text.h"
#include "gradient/tensor_map.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/recorded_forward.h"

namespace lockstep::gradient {
namespace {

// Older forwards are forgotten: a backward of theirs is refused.
constexpr std::size_t kMostForwards = 1 << 16;

// So many sets of parameters are remembered.
constexpr std::size_t kMostParameters = 8;

// Autograd's number of every node that accumulates a parameter's gradient.
constexpr std::uint64_t kAccumulator = std::numeric_limits<std::uint64_t>::max();

// Each parameter's owner, whose weights the backwards have that reach the parameter. A later object takes a parameter
// from an earlier one.
// Never destroyed: an object of static storage may end later.
TensorMap<BackwardWeights*>& owners() {
  static auto* const all = new TensorMap<BackwardWeights*>;
  return *all;
}
BackwardWeights* owner_of(const at::Tensor& parameter) { return owners().find(parameter).value_or(nullptr); }

// Set while a backward runs within another one.
thread_local const BackwardWeights::Inside* inside = nullptr;

// True where the backward that runs adds to the gradient of this parameter, which was given to an object.
bool is_owned(const at::Tensor& parameter) {
  return parameter.requires_grad() && owner_of(parameter) != nullptr && accumulates(parameter);
}

}  // namespace

bool accumulates(const at::Tensor& leaf) {
  const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr || asked->empty()) return true;
  const auto found = asked->find(torch::autograd::impl::grad_accumulator(leaf).get());
  return found != asked->end() && found->second.needed_;
}

BackwardWeights::~BackwardWeights() {
  owners().erase_if([this](const BackwardWeights* owner) { return owner == this; });
}

void BackwardWeights::add_parameters(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    owners().set(parameter, this);
    registered_.push_back(parameter);
  }
}

std::optional<double> BackwardWeights::of_layer(const at::Tensor& parameter) {
  if (inside != nullptr) {
    if (inside->unknown_) std::rethrow_exception(inside->unknown_);
    return inside->weight_;
  }
  if (parameter.defined() && is_owned(parameter)) return owner_of(parameter)->of_this_backward();
  auto* const first = first_in_graph();
  return first == nullptr ? std::nullopt : std::optional(first->of_this_backward());
}

// Returns the oldest owner of a parameter whose gradient the backward that runs adds to; null where there is none.
BackwardWeights* BackwardWeights::first_in_graph() {
  thread_local int backward = -1;
  thread_local BackwardWeights* first = nullptr;
  const int now = torch::autograd::get_current_graph_task_id();
  if (now != -1 && now == backward) return first;
  backward = now;
  first = nullptr;
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return nullptr;
  for (auto* const node : *nodes) {
    if (node->sequence_nr() != kAccumulator) continue;
    const auto* const accumulator = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    if (accumulator == nullptr) continue;
    auto* const owner = owner_of(accumulator->variable);
    if (owner == nullptr || !accumulates(accumulator->variable)) continue;
    if (first == nullptr || owner->number_ < first->number_) first = owner;
  }
  return first;
}

BackwardWeights::Inside::Inside(const std::vector<at::Tensor>& parameters) : outer_(inside) {
  try {
    if (outer_ != nullptr) {
      weight_ = outer_->weight_;
      unknown_ = outer_->unknown_;
    } else if (const auto own = std::ranges::find_if(parameters, is_owned); own != parameters.end()) {
      weight_ = owner_of(*own)->of_this_backward();
    } else if (auto* const first = first_in_graph()) {
      weight_ = first->of_this_backward();
    }
  } catch (...) {
    unknown_ = std::current_exception();
  }
  inside = this;
}
BackwardWeights::Inside::~Inside() { inside = outer_; }

std::uint64_t BackwardWeights::next_number() {
  static std::atomic<std::uint64_t> next = 0;
  return next++;
}

std::uint64_t BackwardWeights::next_node() { return at::sequence_number::peek(); }

void BackwardWeights::add_forward(std::uint64_t begin, std::optional<double> examples) {
  const auto end = next_node();
  if (begin == end) return;
  if (!forwards_.empty() && forwards_.back().begin > begin) return;  // a forward within which another was recorded
  if (forwards_.size() == kMostForwards) forwards_.pop_front();
  forwards_.push_back({begin, end, examples});
}

// Most nodes are of the last forward, or of the loss after it.
BackwardWeights::Forward* BackwardWeights::forward_of(std::uint64_t node) {
  if (forwards_.empty() || node >= forwards_.back().end) return nullptr;
  if (node >= forwards_.back().begin) return &forwards_.back();
  const auto after = std::ranges::upper_bound(forwards_, node, {}, &Forward::begin);
  if (after == forwards_.begin()) return nullptr;
  auto& forward = *std::prev(after);
  return node < forward.end ? &forward : nullptr;
}

BackwardWeights::Found BackwardWeights::look_through(int backward) {
  Found found;
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return found;
  for (auto* const node : *nodes) {
    const auto number = node->sequence_nr();
    if (number == kAccumulator) {
      const auto* const accumulator = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
      if (accumulator == nullptr) continue;
      found.parameters += mix(reinterpret_cast<std::uintptr_t>(accumulator->variable.unsafeGetTensorImpl()));
      continue;
    }
    found.newest = std::max(found.newest, number);
    auto* const forward = forward_of(number);
    if (forward == nullptr || forward->backward == backward) continue;
    forward->backward = backward;
    found.any = true;
    found.unknown = found.unknown || !forward->examples;
    found.examples += forward->examples.value_or(0);
  }
  return found;
}

// True where these parameters were not among the last ones. Several sets are remembered, for losses that take turns, as
// in adversarial training.
bool BackwardWeights::are_other_parameters(std::uint64_t hash) {
  if (std::ranges::find(parameters_, hash) != parameters_.end()) return false;
  if (parameters_.size() == kMostParameters) parameters_.pop_front();
  parameters_.push_back(hash);
  return true;
}

double BackwardWeights::of_this_backward() {
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward == -1 || backward != backward_) {
    weight_ = find_weight(backward);
    backward_ = backward;
  }
  return weight_;
}

double BackwardWeights::find_weight(int backward) {
  const auto& [caller, object, weight, on_other_parameters] = options_;
  if (weight != Weight::by_forwards && !on_other_parameters && !told_ && !last_told_) return 1;
  const auto found = look_through(backward);
  if (on_other_parameters && are_other_parameters(found.parameters)) on_other_parameters();
  bool is_told = last_told_ && found.newest != 0 && found.newest == told_newest_;  // another backward of that graph
  if (told_) {
    last_told_ = std::exchange(told_, std::nullopt);
    told_newest_ = found.newest;
    told_until_ = next_node();
    is_told = true;
  }
  // Without a forward since then this is another backward of the graph that was there when examples were told.
  const bool was_told = is_told || (last_told_ && found.newest < told_until_);
  if (weight != Weight::by_forwards) {
    if (was_told) return *last_told_;
    if (!last_told_ || weight == Weight::as_told) return 1;
    throw InvalidArgument(text(caller, ": the number of examples of this backward is not known, since ", object,
                               ".add_examples was called before another one alone. Call it before each backward; where "
                               "there are several in a step, as in a pipeline, scale the losses instead, and never "
                               "call it"));
  }
  if (is_told) return *last_told_ + found.examples;
  if (found.any && !found.unknown) return found.examples;
  if (was_told) return *last_told_ + found.examples;
  if (found.any) {
    throw InvalidArgument(text(caller,
                               ": the inputs of a forward do not tell how many examples it has, which a tensor "
                               "does, or a tuple that begins with one; call ",
                               object, ".add_examples(n) before it"));
  }
  throw InvalidArgument(
      text(caller, ": no forward that was called through ", object,
           " is in the graph of this backward, so that the number of its examples is not known; call ", object,
           "(x) instead of ", object, "->forward(x), or tell by ", object, ".add_examples(n) before the backward"));
}

}  // namespace lockstep::gradient

namespace lockstep::internal {

RecordedForward::RecordedForward(gradient::BackwardWeights& weights, std::optional<double> examples)
    : weights_(weights), examples_(examples), begin_(gradient::BackwardWeights::next_node()) {}

RecordedForward::~RecordedForward() { weights_.add_forward(begin_, examples_); }

// Autograd does not show the node with which a backward begins: a forward of one operator gets a second one.
at::Tensor RecordedForward::as_result(at::Tensor output) const {
  return gradient::BackwardWeights::next_node() == begin_ + 1 ? output.view_as(output) : output;
}

}  // namespace lockstep::internal
