#include "gradient/updater.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "gradient/tensor_hash.h"
#include "kernels/update.h"
#include "ops/dtypes.h"

namespace lockstep::gradient {

Updater::Updater(std::shared_ptr<ReplicatedParameters> parameters, Optimizer optimizer, ShardMap shards)
    : parameters_(std::move(parameters)),
      optimizer_(std::move(optimizer)),
      shards_(std::move(shards)),
      loss_scale_(optimizer_.options().loss_scale) {
  place_state();
  if (parameters_->placement() == Placement::device) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      device_updates_.emplace_back(optimizer_, parameters_->flat(0, dtype).options());
    }
  }
}

// Places the state of the shards one after the other, each at the beginning of a cache line.
void Updater::place_state() {
  owned_.resize(parameters_->slots().size());
  std::int64_t floats = 0, doubles = 0;
  for (const auto& shard : shards_.owned()) {
    const auto dtype = parameters_->slots()[shard.slot].dtype;
    auto& end = dtype == at::kDouble ? doubles : floats;
    owned_[shard.slot] = {shard.begin, shard.count, end};
    end += whole_lines(shard.count, dtype);
  }
  const auto flat = [&](std::int64_t numel, at::ScalarType dtype, double value) {
    return at::full({numel}, value, parameters_->flat(0, dtype).options());
  };
  for (const auto& spec : optimizer_.rule().states()) {
    state_float_.push_back(flat(floats, at::kFloat, spec.initial_value));
    state_double_.push_back(flat(doubles, at::kDouble, spec.initial_value));
  }
  const auto& options = optimizer_.options();
  if (options.clipnorm || options.global_clipnorm) {
    summed_float_ = flat(floats, at::kFloat, 0);
    summed_double_ = flat(doubles, at::kDouble, 0);
  }
}

std::int64_t Updater::place_of(const Shard& shard) const {
  const auto& owned = owned_[shard.slot];
  return owned.place + shard.begin - owned.begin;
}

void Updater::begin_step() {
  step_ = {iterations_ + 1, learning_rate() * rate_factor_};
  for (auto& update : device_updates_) update.begin(step_);
}

void Updater::update(const GradientSync& gradients, double divide_by, const Group& replicas, Deadline deadline) {
  const auto& options = optimizer_.options();
  if (!device_updates_.empty()) return update_on_device(gradients, divide_by);
  if (options.clipnorm || options.global_clipnorm) {
    return update_clipped_by_norm(gradients, divide_by, replicas, deadline);
  }
  const optimizer::GradientScale scale{divide_by, options.clipvalue};
  for_each_shard(replicas.rank(), gradients, [&]<class T>(T, const Shard& shard, const std::vector<const T*>& sources) {
    update_shard<T>(shard, sources, scale, gradients);
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
  return flat.template mutable_data_ptr<T>() + place_of(shard);
}

template <class T>
void Updater::update_shard(const Shard& shard, const std::vector<const T*>& gradients,
                           const optimizer::GradientScale& scale, const GradientSync& sync) {
  const auto& slot = parameters_->slots()[shard.slot];
  const auto offset = slot.offset + shard.begin;
  std::vector<T*> values;
  for (const auto& flat : sync.written(slot.dtype)) values.push_back(flat.template mutable_data_ptr<T>() + offset);
  std::vector<T*> state;
  for (const auto& flat : std::is_same_v<T, double> ? state_double_ : state_float_) {
    state.push_back(flat.template mutable_data_ptr<T>() + place_of(shard));
  }
  optimizer::reduce_and_update<T>(optimizer_, step_, scale,
                                  {gradients, values, state, static_cast<std::size_t>(shard.count)});
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
  std::vector<double> squares(owned_.size());  // [slot]
  for_each_shard(replicas.rank(), gradients, [&]<class T>(T, const Shard& shard, const std::vector<const T*>& sources) {
    const auto count = static_cast<std::size_t>(shard.count);
    optimizer::sum_gradients<T>(sources, {.divide_by = divide_by}, summed<T>(shard), count);
    squares[shard.slot] += kernels::update_kernels<T>().sum_of_squares(summed<T>(shard), count);
  });
  gradients.sum_over_owners(squares, replicas, deadline);
  for_each_shard(replicas.rank(), gradients, [&]<class T>(T, const Shard& shard, const std::vector<const T*>&) {
    update_shard<T>(shard, {summed<T>(shard)}, {.divide_by = 1 / norm_factor(squares, shard.slot)}, gradients);
  });
}

// What clipping multiplies the parameter's gradient by: bound / max(norm, bound).
double Updater::norm_factor(const std::vector<double>& squares, std::size_t slot) const {
  const auto& options = optimizer_.options();
  const double sum = options.clipnorm ? squares[slot] : std::accumulate(squares.begin(), squares.end(), 0.0);
  const double bound = options.clipnorm ? *options.clipnorm : *options.global_clipnorm;
  return bound / std::max(std::sqrt(sum), bound);
}

double Updater::learning_rate() const {
  return rate_override_ ? *rate_override_
                        : LearningRate(optimizer_.options().learning_rate.at(iterations_)).at(0);  // checked
}

// LearningRate checks the value.
void Updater::set_learning_rate(double rate) { rate_override_ = LearningRate(rate).at(0); }

at::Tensor Updater::state(std::size_t slot, std::size_t index) const {
  const auto& info = parameters_->slots()[slot];
  const auto& owned = owned_[slot];
  const auto& flat = info.dtype == at::kDouble ? state_double_[index] : state_float_[index];
  const auto own = flat.narrow(0, owned.place, owned.count);
  return owned.count == info.numel ? own.view(info.sizes) : own;
}

at::Tensor Updater::owned_part(std::size_t slot, const at::Tensor& whole) const {
  const auto& owned = owned_[slot];
  if (owned.count == parameters_->slots()[slot].numel) return whole;
  return whole.reshape({-1}).narrow(0, owned.begin, owned.count);
}

std::uint64_t Updater::hash_of_state() const {
  std::uint64_t hash = 0;
  for (const auto& flat : state_float_) hash = mix(hash, hash_of(flat));
  for (const auto& flat : state_double_) hash = mix(hash, hash_of(flat));
  return hash;
}

std::int64_t Updater::state_bytes() const {
  std::size_t bytes = 0;
  for (const auto& flat : state_float_) bytes += flat.nbytes();
  for (const auto& flat : state_double_) bytes += flat.nbytes();
  return static_cast<std::int64_t>(bytes);
}

}  // namespace lockstep::gradient
