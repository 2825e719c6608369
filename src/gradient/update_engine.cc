#include "gradient/update_engine.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "base/log.h"
#include "base/text.h"
#include "gradient/gradient_exchange.h"
#include "kernels/update.h"
#include "lockstep/error.h"
#include "optimizer/describe.h"

namespace lockstep {
namespace {

// Ranges are cut at multiples of this many elements: whole cache lines for float and double.
constexpr std::int64_t kCut = 16;

Exchange exchange_of(const Optimizer& optimizer, Exchange asked) {
  return optimizer.options().exchange ? Exchange::one_pass : asked;
}

}  // namespace

UpdateEngine::UpdateEngine(std::shared_ptr<ReplicatedParameters> parameters, Optimizer optimizer, Exchange exchange,
                           int root, WorkerGradientsOptions between_workers)
    : parameters_(std::move(parameters)),
      optimizer_(std::move(optimizer)),
      exchange_(exchange_of(optimizer_, exchange)),
      contributions_(static_cast<std::size_t>(parameters_->replicas())),
      loss_scale_(optimizer_.options().loss_scale) {
  parameters_->update_trainable();
  for (const auto& spec : optimizer_.rule().states()) {
    state_float_.push_back(at::full_like(parameters_->flat(0, at::kFloat), spec.initial_value));
    state_double_.push_back(at::full_like(parameters_->flat(0, at::kDouble), spec.initial_value));
  }
  if (parameters_->placement() == Placement::device) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      device_updates_.emplace_back(optimizer_, parameters_->flat(0, dtype).options());
    }
  }
  if (exchange_ == Exchange::hierarchical_copy) {
    for (int replica = 0; replica < parameters_->replicas(); ++replica) {
      tree_float_.push_back(at::zeros({parameters_->flat_numel(at::kFloat)}, at::kFloat));
      tree_double_.push_back(at::zeros({parameters_->flat_numel(at::kDouble)}, at::kDouble));
    }
  }
  const auto& options = optimizer_.options();
  if (options.clipnorm || options.global_clipnorm) {
    summed_float_ = at::zeros({parameters_->flat_numel(at::kFloat)}, at::kFloat);
    summed_double_ = at::zeros({parameters_->flat_numel(at::kDouble)}, at::kDouble);
  }
  for (auto& contribution : contributions_) {
    contribution.gradients.resize(parameters_->slots().size());
    contribution.squares.resize(parameters_->slots().size());
  }
  assign_ranges(root);
  const auto* const other = optimizer_.options().exchange.get();
  if (other != nullptr && parameters_->workers().size() > 1) {
    throw InvalidArgument(
        text("the optimizer's gradients meet those of other processes, and so do those of the strategy's ",
             parameters_->workers().size(), " workers; take one or the other"));
  }
  if (other == nullptr && workers().size() > 1) make_worker_gradients(between_workers);
}

void UpdateEngine::meet_exchange() {
  const auto& other = optimizer_.options().exchange;
  if (!other || other->workers.size() == 1 || workers_ != nullptr) return;
  parameters_->compare_models(other->workers);
  other->workers.check_all_agree("numbers of replicas", std::to_string(parameters_->replicas()));
  make_worker_gradients(other->options);
}

void UpdateEngine::make_worker_gradients(const WorkerGradientsOptions& options) {
  workers().check_all_agree("optimizers", describe(optimizer_));
  workers_ = std::make_unique<WorkerGradients>(*parameters_, workers(), options);
  hook_gradients();
}

// Cuts the trainable elements into equal shares, one a replica, or gives them all to `root`.
void UpdateEngine::assign_ranges(int root) {
  ranges_.resize(contributions_.size());
  std::int64_t total = 0;
  for (const auto& slot : parameters_->slots()) total += slot.trainable ? slot.numel : 0;
  const auto replicas = static_cast<std::int64_t>(ranges_.size());
  const auto share_end = [&](std::int64_t replica) { return total * (replica + 1) / replicas; };

  std::int64_t done = 0;
  std::int64_t replica = 0;
  for (std::size_t i = 0; i < parameters_->slots().size(); ++i) {
    const auto& slot = parameters_->slots()[i];
    if (!slot.trainable) continue;
    for (std::int64_t begin = 0; begin < slot.numel;) {
      std::int64_t count = slot.numel - begin;
      if (exchange_ == Exchange::one_pass) {
        while (replica + 1 < replicas && done >= share_end(replica)) ++replica;
        const auto left = (share_end(replica) - done + kCut - 1) / kCut * kCut;
        if (replica + 1 < replicas) count = std::min(count, left);
      }
      const auto owner =
          exchange_ == Exchange::reduction_to_one_device ? root : replica;  // the tree's root is replica 0
      ranges_[static_cast<std::size_t>(owner)].push_back({i, begin, count});
      begin += count;
      done += count;
    }
  }
}

const Communicator& UpdateEngine::workers() const {
  const auto& other = optimizer_.options().exchange;
  return other ? other->workers : parameters_->workers();
}

void UpdateEngine::apply(const Group& group, double weight, Deadline deadline) {
  const int replica = group.rank();
  if (group.size() != parameters_->replicas()) {
    throw InvalidArgument(text("an optimizer for ", parameters_->replicas(), " replicas is applied on ", group.size(),
                               "; make model and optimizer with the strategy that runs them"));
  }
  if (!(weight >= 0) || std::isinf(weight)) {
    throw InvalidArgument(text("a replica's weight is ", weight, "; it must be 0 (no examples) or more, and finite"));
  }
  if (workers_ == nullptr && workers().size() > 1)
    throw Error("an update before the other ranks' models and optimizers were compared");
  auto& mine = contributions_[static_cast<std::size_t>(replica)];
  take_gradients(replica);
  if (replica == 0) begin_update();
  mine.weight = weight;
  mine.finite = workers_ != nullptr || !loss_scale_.used() || finite_gradients(replica);
  const double scale = loss_scale_.value();
  if (workers_ != nullptr) workers_->finish(replica, weight);
  group.barrier(deadline);  // every backward has ended well: from here on nothing throws but a deadline
  if (workers_ != nullptr) meet_other_workers(group, deadline);

  const double total = all_finite() ? total_weight() : 0;
  const double divide_by = total * scale / (workers_ != nullptr ? workers_->divided_by() : 1);
  if (total > 0) {
    const auto& options = optimizer_.options();
    if (exchange_ == Exchange::hierarchical_copy) sum_up_tree(group, deadline);
    if (!device_updates_.empty()) {
      update_on_device(divide_by);
    } else if (options.clipnorm || options.global_clipnorm) {
      update_clipped_by_norm(group, divide_by, deadline);
    } else {
      update_ranges(replica, divide_by);
    }
    if (exchange_ == Exchange::hierarchical_copy) copy_down_tree(group, deadline);
  }
  if (replica == 0 && total_weight() > 0 && !loss_scale_.move(all_finite())) {
    log_warning("gradients are not finite even with the smallest loss scale: this step changes nothing");
  }
  group.barrier(deadline);  // every copy is written, and nobody reads my gradients any more
  parameters_->refresh(replica);
  for (auto& gradient : mine.gradients) gradient.reset();
  if (replica == 0 && total > 0) ++iterations_;
  if (workers_ == nullptr) return;
  if (replica == 0) {
    workers_->end_step();
    const auto every = workers_->compare_copies_every();
    if (every > 0 && total > 0 && iterations_ % every == 0) parameters_->compare_copies(workers());
  }
  group.barrier(deadline);
}

// The sums of all workers' gradients come in the place of this process's.
void UpdateEngine::meet_other_workers(const Group& group, Deadline deadline) {
  if (group.rank() == 0) {
    workers_->wait();
    if (loss_scale_.used()) contributions_[0].finite = workers_->finite();
  }
  group.barrier(deadline);
}

bool UpdateEngine::all_finite() const {
  return std::all_of(contributions_.begin(), contributions_.end(), [](const auto& replica) { return replica.finite; });
}

double UpdateEngine::total_weight() const {
  if (workers_ != nullptr) {
    const auto& other = optimizer_.options().exchange;
    return workers_->total_weight() / (other && other->sum ? std::max(1.0, workers_->workers_with_weight()) : 1);
  }
  double total = 0;
  for (const auto& contribution : contributions_) total += contribution.weight;
  return total;
}

bool UpdateEngine::has_gradient(std::size_t slot) const {
  if (workers_ != nullptr) return workers_->has_gradient(slot);
  return std::any_of(contributions_.begin(), contributions_.end(),
                     [slot](const auto& contribution) { return contribution.gradients[slot].defined(); });
}

// Calls visit(T()) with the element type of the range's parameter, unless nobody has a gradient for it.
template <class Visit>
void UpdateEngine::visit(const Range& range, const Visit& visit) const {
  if (!has_gradient(range.slot)) return;
  if (parameters_->slots()[range.slot].dtype == at::kDouble) {
    visit(double());
  } else {
    visit(float());
  }
}

template <class T>
std::vector<const T*> UpdateEngine::gradients_of(const Range& range) const {
  if (exchange_ == Exchange::hierarchical_copy) {
    const auto& flat = std::is_same_v<T, double> ? tree_double_[0] : tree_float_[0];
    return {flat.template const_data_ptr<T>() + parameters_->slots()[range.slot].offset + range.begin};
  }
  if (workers_ != nullptr) return {workers_->sum(range.slot).template const_data_ptr<T>() + range.begin};
  std::vector<const T*> gradients;
  for (const auto& contribution : contributions_) {
    const auto& gradient = contribution.gradients[range.slot];
    if (gradient.defined()) gradients.push_back(gradient.template const_data_ptr<T>() + range.begin);
  }
  return gradients;
}

template <class T>
T* UpdateEngine::summed(const Range& range) const {
  const auto& flat = std::is_same_v<T, double> ? summed_double_ : summed_float_;
  return flat.template mutable_data_ptr<T>() + parameters_->slots()[range.slot].offset + range.begin;
}

template <class T>
void UpdateEngine::update_range(const Range& range, std::vector<const T*> gradients, const GradientScale& scale) {
  const auto& slot = parameters_->slots()[range.slot];
  const auto offset = slot.offset + range.begin;
  const int written = exchange_ == Exchange::hierarchical_copy ? 1 : parameters_->copies();  // the tree copies on
  std::vector<T*> values;
  for (int copy = 0; copy < written; ++copy) {
    values.push_back(parameters_->flat(copy, slot.dtype).template mutable_data_ptr<T>() + offset);
  }
  std::vector<T*> state;
  for (const auto& flat : std::is_same_v<T, double> ? state_double_ : state_float_) {
    state.push_back(flat.template mutable_data_ptr<T>() + offset);
  }
  reduce_and_update<T>(optimizer_, step_, scale, {gradients, values, state, static_cast<std::size_t>(range.count)});
}

void UpdateEngine::update_ranges(int replica, double divide_by) {
  const GradientScale scale{divide_by, optimizer_.options().clipvalue};
  for (const auto& range : ranges_[static_cast<std::size_t>(replica)]) {
    visit(range, [&]<class T>(T) { update_range<T>(range, gradients_of<T>(range), scale); });
  }
}

void UpdateEngine::update_on_device(double divide_by) {
  for (auto& update : device_updates_) {
    const auto dtype = &update == &device_updates_[0] ? at::kFloat : at::kDouble;
    DeviceParameters parameters;
    parameters.states.resize(state_float_.size());
    for (std::size_t i = 0; i < parameters_->slots().size(); ++i) {
      if (parameters_->slots()[i].dtype != dtype || !has_gradient(i)) continue;
      parameters.values.push_back(parameters_->parameter(0, i).detach());
      parameters.gradients.push_back(device_gradient(i));
      for (std::size_t k = 0; k < parameters.states.size(); ++k) parameters.states[k].push_back(state(i, k));
    }
    if (!parameters.values.empty()) update.apply(parameters, divide_by);
  }
}

at::Tensor UpdateEngine::device_gradient(std::size_t slot) const {
  if (workers_ == nullptr) return contributions_[0].gradients[slot];
  const auto& parameter = parameters_->parameter(0, slot);
  return workers_->sum(slot).view(parameter.sizes()).to(parameter.device());
}

void UpdateEngine::begin_update() {
  step_ = {iterations_ + 1, learning_rate()};
  for (auto& update : device_updates_) update.begin(step_);
}

void UpdateEngine::update_recorded(double weight) {
  take_gradients(0);
  update_on_device(weight);
  for (auto& gradient : contributions_[0].gradients) gradient.reset();
}

// A norm needs all gradients before the first update: one pass sums and squares, a second one updates.
void UpdateEngine::update_clipped_by_norm(const Group& group, double divide_by, Deadline deadline) {
  const auto replica = static_cast<std::size_t>(group.rank());
  auto& squares = contributions_[replica].squares;
  std::fill(squares.begin(), squares.end(), 0.0);
  for (const auto& range : ranges_[replica]) {
    visit(range, [&]<class T>(T) {
      const auto count = static_cast<std::size_t>(range.count);
      sum_gradients<T>(gradients_of<T>(range), {.divide_by = divide_by}, summed<T>(range), count);
      squares[range.slot] += kernels::update_kernels<T>().sum_of_squares(summed<T>(range), count);
    });
  }
  group.barrier(deadline);
  for (const auto& range : ranges_[replica]) {
    visit(range,
          [&]<class T>(T) { update_range<T>(range, {summed<T>(range)}, {.divide_by = 1 / norm_factor(range.slot)}); });
  }
}

// What clipping multiplies the parameter's gradient by: bound / max(norm, bound).
double UpdateEngine::norm_factor(std::size_t slot) const {
  const auto& options = optimizer_.options();
  double squares = 0;
  for (const auto& contribution : contributions_) {
    if (options.clipnorm) {
      squares += contribution.squares[slot];
    } else {
      for (const double square : contribution.squares) squares += square;
    }
  }
  const double bound = options.clipnorm ? *options.clipnorm : *options.global_clipnorm;
  return bound / std::max(std::sqrt(squares), bound);
}

WorkerGradients::Learned UpdateEngine::learned_of_workers() const {
  return workers_ == nullptr ? WorkerGradients::Learned() : workers_->learned();
}

void UpdateEngine::restore_learned_of_workers(const WorkerGradients::Learned& learned) {
  if (workers_ != nullptr) workers_->restore(learned);
}

double UpdateEngine::learning_rate() const {
  return rate_override_ ? *rate_override_
                        : LearningRate(optimizer_.options().learning_rate.at(iterations_)).at(0);  // checked
}

// The schedule checks it.
void UpdateEngine::set_learning_rate(double rate) { rate_override_ = LearningRate(rate).at(0); }

at::Tensor UpdateEngine::state(std::size_t slot, std::size_t index) const {
  const auto& info = parameters_->slots()[slot];
  const auto& flat = info.dtype == at::kDouble ? state_double_[index] : state_float_[index];
  return flat.narrow(0, info.offset, info.numel).view(info.sizes);
}

}  // namespace lockstep
