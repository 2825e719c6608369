#include "gradient/updater.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "kernels/update.h"

namespace lockstep {

Updater::Updater(std::shared_ptr<ReplicatedParameters> parameters, Optimizer optimizer, ShardMap shards)
    : parameters_(std::move(parameters)),
      optimizer_(std::move(optimizer)),
      shards_(std::move(shards)),
      squares_(static_cast<std::size_t>(parameters_->replicas()), std::vector<double>(parameters_->slots().size())),
      loss_scale_(optimizer_.options().loss_scale) {
  for (const auto& spec : optimizer_.rule().states()) {
    state_float_.push_back(at::full_like(parameters_->flat(0, at::kFloat), spec.initial_value));
    state_double_.push_back(at::full_like(parameters_->flat(0, at::kDouble), spec.initial_value));
  }
  if (parameters_->placement() == Placement::device) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      device_updates_.emplace_back(optimizer_, parameters_->flat(0, dtype).options());
    }
  }
  const auto& options = optimizer_.options();
  if (options.clipnorm || options.global_clipnorm) {
    summed_float_ = at::zeros({parameters_->flat_numel(at::kFloat)}, at::kFloat);
    summed_double_ = at::zeros({parameters_->flat_numel(at::kDouble)}, at::kDouble);
  }
}

void Updater::begin_step() {
  step_ = {iterations_ + 1, learning_rate()};
  for (auto& update : device_updates_) update.begin(step_);
}

void Updater::update(const GradientSync& gradients, double divide_by, const Group& replicas, Deadline deadline) {
  const auto& options = optimizer_.options();
  if (!device_updates_.empty()) return update_on_device(gradients, divide_by);
  if (options.clipnorm || options.global_clipnorm) {
    return update_clipped_by_norm(gradients, divide_by, replicas, deadline);
  }
  const GradientScale scale{divide_by, options.clipvalue};
  for_each_shard(replicas.rank(), gradients, [&]<class T>(T, const Shard& shard, const std::vector<const T*>& sources) {
    update_shard<T>(shard, sources, scale, gradients.written_copies());
  });
}

template <class Act>
void Updater::for_each_shard(int replica, const GradientSync& gradients, const Act& act) const {
  for (const auto& shard : shards_.of(replica)) {
    const auto sources = gradients.sources(shard.slot);
    if (sources.empty()) continue;
    const auto visit = [&]<class T>(T) {
      std::vector<const T*> begins;
      for (const auto* const source : sources) begins.push_back(source->const_data_ptr<T>() + shard.begin);
      act(T(), shard, begins);
    };
    if (parameters_->slots()[shard.slot].dtype == at::kDouble) {
      visit(double());
    } else {
      visit(float());
    }
  }
}

template <class T>
T* Updater::summed(const Shard& shard) const {
  const auto& flat = std::is_same_v<T, double> ? summed_double_ : summed_float_;
  return flat.template mutable_data_ptr<T>() + parameters_->slots()[shard.slot].offset + shard.begin;
}

template <class T>
void Updater::update_shard(const Shard& shard, const std::vector<const T*>& gradients, const GradientScale& scale,
                           int written_copies) {
  const auto& slot = parameters_->slots()[shard.slot];
  const auto offset = slot.offset + shard.begin;
  std::vector<T*> values;
  for (int copy = 0; copy < written_copies; ++copy) {
    values.push_back(parameters_->flat(copy, slot.dtype).template mutable_data_ptr<T>() + offset);
  }
  std::vector<T*> state;
  for (const auto& flat : std::is_same_v<T, double> ? state_double_ : state_float_) {
    state.push_back(flat.template mutable_data_ptr<T>() + offset);
  }
  reduce_and_update<T>(optimizer_, step_, scale, {gradients, values, state, static_cast<std::size_t>(shard.count)});
}

void Updater::update_on_device(const GradientSync& gradients, double divide_by) {
  for (auto& update : device_updates_) {
    const auto dtype = &update == &device_updates_[0] ? at::kFloat : at::kDouble;
    DeviceParameters parameters;
    parameters.states.resize(state_float_.size());
    for (std::size_t i = 0; i < parameters_->slots().size(); ++i) {
      const auto sources = gradients.sources(i);
      if (parameters_->slots()[i].dtype != dtype || sources.empty()) continue;
      const auto& parameter = parameters_->parameter(0, i);
      parameters.values.push_back(parameter.detach());
      parameters.gradients.push_back(sources[0]->view(parameter.sizes()).to(parameter.device()));
      for (std::size_t k = 0; k < parameters.states.size(); ++k) parameters.states[k].push_back(state(i, k));
    }
    if (!parameters.values.empty()) update.apply(parameters, divide_by);
  }
}

// A norm needs all gradients before the first update: one pass sums and squares, a second one updates.
void Updater::update_clipped_by_norm(const GradientSync& gradients, double divide_by, const Group& replicas,
                                     Deadline deadline) {
  auto& squares = squares_[static_cast<std::size_t>(replicas.rank())];
  std::fill(squares.begin(), squares.end(), 0.0);
  for_each_shard(replicas.rank(), gradients, [&]<class T>(T, const Shard& shard, const std::vector<const T*>& sources) {
    const auto count = static_cast<std::size_t>(shard.count);
    sum_gradients<T>(sources, {.divide_by = divide_by}, summed<T>(shard), count);
    squares[shard.slot] += kernels::update_kernels<T>().sum_of_squares(summed<T>(shard), count);
  });
  replicas.barrier(deadline);
  for_each_shard(replicas.rank(), gradients, [&]<class T>(T, const Shard& shard, const std::vector<const T*>&) {
    update_shard<T>(shard, {summed<T>(shard)}, {.divide_by = 1 / norm_factor(shard.slot)}, gradients.written_copies());
  });
}

// What clipping multiplies the parameter's gradient by: bound / max(norm, bound).
double Updater::norm_factor(std::size_t slot) const {
  const auto& options = optimizer_.options();
  double sum = 0;
  for (const auto& squares : squares_) {
    if (options.clipnorm) {
      sum += squares[slot];
    } else {
      for (const double square : squares) sum += square;
    }
  }
  const double bound = options.clipnorm ? *options.clipnorm : *options.global_clipnorm;
  return bound / std::max(std::sqrt(sum), bound);
}

double Updater::learning_rate() const {
  return rate_override_ ? *rate_override_
                        : LearningRate(optimizer_.options().learning_rate.at(iterations_)).at(0);  // checked
}

// The schedule checks it.
void Updater::set_learning_rate(double rate) { rate_override_ = LearningRate(rate).at(0); }

at::Tensor Updater::state(std::size_t slot, std::size_t index) const {
  const auto& info = parameters_->slots()[slot];
  const auto& flat = info.dtype == at::kDouble ? state_double_[index] : state_float_[index];
  return flat.narrow(0, info.offset, info.numel).view(info.sizes);
}

}  // namespace lockstep
