#include "gradient/updater.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/hash.h"
#include "kernels/update.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "ops/tensors.h"

namespace lockstep::gradient {

Updater::Updater(std::shared_ptr<ReplicatedParameters> parameters, Optimizer optimizer, const Ownership& ownership,
                 std::optional<Communicator> commits)
    : parameters_(std::move(parameters)),
      optimizer_(std::move(optimizer)),
      ownership_(ownership),
      commits_(std::move(commits)),
      parts_(parameters_->is_split() ? slots_by_holders(*parameters_) : SlotGroups()),
      states_(initial_states()),
      loss_scale_(optimizer_.options().loss_scale) {
  if (parameters_->placement() != Placement::device) return;
  device_updates_.resize(static_cast<std::size_t>(parameters_->replicas()));
  for (int replica = 0; replica < parameters_->replicas(); ++replica) {
    if (replica > 0) other_states_.emplace_back(*parameters_, optimizer_, shards_of(replica), replica);
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const auto flat = parameters_->flat(replica, dtype);
      if (flat.numel() == 0) continue;
      OnDevice on_device{DeviceUpdate(optimizer_, flat.options())};
      for (const double number : on_device.update.numbers(step_after(0)))
        on_device.numbers.push_back(at::full({}, number, flat.options()));
      device_updates_[static_cast<std::size_t>(replica)].emplace(dtype, std::move(on_device));
    }
  }
}

Updater::States Updater::initial_states() const {
  return {ShardState(*parameters_, optimizer_, shards_of(0)),
          ShardState(*parameters_, optimizer_, ownership_.copies())};
}

// Returns the shards whose state the replica has. In host memory the replicas share that of all that this process owns.
ShardMap Updater::shards_of(int replica) const {
  if (parameters_->placement() != Placement::device) return ownership_.own();
  return ShardMap::all_to(0, ownership_.own().of(replica), 1);
}

std::uint64_t Updater::hash() const {
  auto hash = states_.own.hash();
  if (ownership_.is_sharded()) {
    for (const auto& other : other_states_) hash = mix(hash, other.hash());
  }
  return hash;
}

Updater::States Updater::exchange_states(States states) {
  remembered_.reset();
  auto before = std::exchange(states_, std::move(states));
  spread_state();
  return before;
}

void Updater::spread_state() {
  if (ownership_.is_sharded()) return;
  for (auto& other : other_states_) other.copy_from(states_.own);
}

void Updater::tell_broke_off() {
  MutexLock lock(breaking_);
  broken_ = Broken{.assigned = parameters_->assignments()};
}

void Updater::tell_state_loaded() {
  MutexLock lock(breaking_);
  if (broken_) broken_->lacks_state = false;
}

void Updater::require_restored() {
  MutexLock lock(breaking_);
  if (!broken_) return;
  const auto values = static_cast<std::int64_t>(parameters_->slots().size());
  if (broken_->lacks_state || parameters_->assignments() < broken_->assigned + values) {
    throw Error(
        "an earlier update broke off with an error, so variables and the optimizer's state may be of two steps: load "
        "both from a checkpoint");
  }
  broken_.reset();
}

void Updater::begin_step() {
  require_restored();
  prepared_.reset();
  step_ = step_after(0);
  if (!device_updates_.empty()) put_numbers(0);
}

// Copies what changes from step to step to the replica's device, in the calling thread's stream.
void Updater::put_numbers(int replica) {
  for (auto& [dtype, on_device] : device_updates_[static_cast<std::size_t>(replica)]) {
    const auto numbers = on_device.update.numbers(step_);
    for (std::size_t i = 0; i < numbers.size(); ++i) on_device.numbers[i].fill_(numbers[i]);
  }
}

UpdateStep Updater::step_after(std::int64_t ahead) const {
  return {iterations_ + ahead + 1, learning_rate_after(ahead) * rate_factor_};
}

// A norm needs all gradients before the first update: one pass sums and squares, a second pass updates.
void Updater::update(const Sums& sums, double divide_by, const Group& replicas, Deadline deadline) {
  if (!device_updates_.empty()) return update_on_device(replicas.rank(), sums, divide_by, deadline);
  Prepared prepared{.sums = sums, .divide_by = divide_by};
  if (clips_by_norm(optimizer_)) sum_and_square(prepared, replicas, deadline);
  const bool writes = replicas.rank() == 0;
  if (commits_) {
    if (writes) {
      prepared_ = prepared;
      commits_->group().barrier(commits_->deadline());
    }
    replicas.barrier(deadline);
    if (writes) prepared_.reset();
  }
  update_shards(replicas.rank(), prepared);
}

void Updater::complete() {
  if (!prepared_) throw Error("the update of a step that failed cannot be completed");
  const auto prepared = *std::exchange(prepared_, std::nullopt);
  for (int replica = 0; replica < parameters_->replicas(); ++replica) update_shards(replica, prepared);
}

void Updater::update_shards(int replica, const Prepared& prepared) {
  for (const auto* const states : {&states_.own, &states_.copies}) {
    for_each_shard(*states, replica, prepared.sums,
                   [&]<class T>(T, const Shard& shard, const std::vector<const T*>& parts) {
                     if (clips_by_norm(optimizer_)) {
                       update_shard<T>(*states, shard, {states->summed<T>(shard)},
                                       {.divide_by = 1 / norm_factor(prepared, shard.slot)});
                     } else {
                       update_shard<T>(*states, shard, parts, {prepared.divide_by, optimizer_.options().clipvalue});
                     }
                   });
  }
}

template <class Act>
void Updater::for_each_shard(const ShardState& states, int replica, const Sums& sums, const Act& act) const {
  for (const auto& shard : states.shards().of(replica)) {
    const auto visit = [&]<class T>(T) {
      std::vector<const T*> parts;
      for (const auto& part : sums.parts) {
        if (part[shard.slot].defined()) parts.push_back(part[shard.slot].template const_data_ptr<T>() + shard.begin);
      }
      if (!parts.empty()) act(T(), shard, parts);
    };
    if (parameters_->slots()[shard.slot].dtype == at::kDouble) {
      visit(double());
    } else {
      visit(float());
    }
  }
}

template <class T>
void Updater::update_shard(const ShardState& states, const Shard& shard, const std::vector<const T*>& gradients,
                           const optimizer::GradientScale& scale) const {
  const auto& slot = parameters_->slots()[shard.slot];
  const auto offset = slot.offset + shard.begin;
  std::vector<T*> values;
  for (const auto& flat : written(slot.dtype)) values.push_back(flat.template mutable_data_ptr<T>() + offset);
  std::vector<T*> state;
  for (std::size_t i = 0; i < states.states(); ++i) state.push_back(states.state<T>(shard, i));
  optimizer::reduce_and_update<T>(optimizer_, step_, scale,
                                  {gradients, values, state, static_cast<std::size_t>(shard.count)});
}

std::span<const at::Tensor> Updater::written(at::ScalarType dtype) const {
  switch (ownership_.writes()) {
    case Ownership::Writes::all_copies: return parameters_->flats(dtype);
    case Ownership::Writes::own_copy: break;  // update_on_device
    case Ownership::Writes::first_copy: return parameters_->flats(dtype).first(1);
    case Ownership::Writes::first_copies: return parameters_->mapped_values(dtype);
  }
  throw Error("an unknown kind of copies");
}

// A failure here, such as a lack of memory, is of one GPU, while others may have made their updates.
void Updater::update_on_device(int replica, const Sums& sums, double divide_by, Deadline deadline) {
  try {
    update_own_copy(replica, sums, divide_by, deadline);
  } catch (...) {
    tell_broke_off();
    throw;
  }
}

void Updater::update_own_copy(int replica, const Sums& sums, double divide_by, Deadline deadline) {
  const at::NoGradGuard no_grad;
  if (replica > 0) put_numbers(replica);
  const auto& states = state_of(replica);
  std::map<at::ScalarType, ShardsOnDevice> all;
  for (const auto& shard : states.shards().owned()) {
    const auto& sum = sums.parts[0][shard.slot];  // the only part
    if (!sum.defined()) continue;
    const auto& slot = parameters_->slots()[shard.slot];
    const auto& parameter = parameters_->parameter(replica, shard.slot);
    const bool is_whole = shard.count == slot.numel;
    const auto own = [&](const at::Tensor& of) {
      return is_whole ? of.view(slot.sizes) : of.view({-1}).narrow(0, shard.begin, shard.count);
    };
    auto& [slots, parameters] = all[slot.dtype];
    slots.push_back(shard.slot);
    parameters.values.push_back(own(parameter.detach()));
    parameters.gradients.push_back(own(sum).to(parameter.device()));
    parameters.states.resize(states.states());
    for (std::size_t k = 0; k < parameters.states.size(); ++k) {
      const auto state = states.state(shard.slot, k);
      parameters.states[k].push_back(is_whole ? state.view(slot.sizes) : state);
    }
  }
  auto& updates = device_updates_[static_cast<std::size_t>(replica)];
  for (auto& [dtype, shards] : all)
    shards.parameters.gradients = updates.at(dtype).update.scaled(shards.parameters.gradients, divide_by);
  if (clips_by_norm(optimizer_)) clip_on_device(replica, sums, all, deadline);
  for (const auto& [dtype, shards] : all) updates.at(dtype).update.apply(shards.parameters, updates.at(dtype).numbers);
}

// Norms of all slots that anybody has a gradient of, in the same order on all owners.
void Updater::clip_on_device(int replica, const Sums& sums, std::map<at::ScalarType, ShardsOnDevice>& all,
                             Deadline deadline) const {
  std::vector<std::size_t> place(parameters_->slots().size());  // [slot]: among those with a gradient
  std::size_t count = 0;
  for (std::size_t i = 0; i < place.size(); ++i) {
    place[i] = count;
    count += sums.parts[0][i].defined() ? 1 : 0;
  }
  if (count == 0) return;
  const auto device = parameters_->parameter(replica, 0).device();
  const bool in_double = all.contains(at::kDouble) || sums.owners != nullptr;
  const auto options = at::TensorOptions(device).dtype(in_double ? at::kDouble : at::kFloat);
  std::vector<at::Tensor> norms(count);
  for (const auto& [dtype, shards] : all) {
    const auto of_shards = at::_foreach_norm(shards.parameters.gradients);
    const auto as_wanted = at::stack(of_shards).to(options.dtype()).unbind();
    for (std::size_t i = 0; i < of_shards.size(); ++i) norms[place[shards.slots[i]]] = as_wanted[i];
  }
  const auto nothing = at::zeros({}, options);
  for (auto& norm : norms) {
    if (!norm.defined()) norm = nothing;
  }
  auto whole = at::stack(norms);
  if (sums.owners != nullptr) {
    whole.square_();
    all_reduce(sums.owners->group(), whole, ReduceOp::sum, deadline);
    whole.sqrt_();
  }
  const auto factors = clip_factors(optimizer_, whole).unbind();
  for (auto& [dtype, shards] : all) {
    for (std::size_t i = 0; i < shards.slots.size(); ++i)
      shards.parameters.gradients[i] = shards.parameters.gradients[i] * factors[place[shards.slots[i]]];
  }
}

// Keeps the means of this replica's shards, and sums the squares of their norms over all owners.
void Updater::sum_and_square(Prepared& prepared, const Group& replicas, Deadline deadline) {
  auto& squares = prepared.squares;
  squares.resize(parameters_->slots().size());
  for (const auto* const states : {&states_.own, &states_.copies}) {
    for_each_shard(*states, replicas.rank(), prepared.sums,
                   [&]<class T>(T, const Shard& shard, const std::vector<const T*>& parts) {
                     const auto count = static_cast<std::size_t>(shard.count);
                     auto* const summed = states->summed<T>(shard);
                     optimizer::sum_gradients<T>(parts, {.divide_by = prepared.divide_by}, summed, count);
                     if (states == &states_.copies) return;  // its owner adds it
                     squares[shard.slot] += kernels::update_kernels<T>().sum_of_squares(summed, count);
                   });
  }
  ownership_.sum_over_owners(squares, replicas, deadline);
  prepared.all_squares = parameters_->is_split() ? sum_squares_of_parts(*parameters_, parts_, squares)
                                                 : std::accumulate(squares.begin(), squares.end(), 0.0);
}

// Returns the factor by which clipping multiplies the parameter's gradient: bound / max(norm, bound).
double Updater::norm_factor(const Prepared& prepared, std::size_t slot) const {
  const auto& options = optimizer_.options();
  const double sum = options.clipnorm ? prepared.squares[slot] : prepared.all_squares;
  const double bound = options.clipnorm ? *options.clipnorm : *options.global_clipnorm;
  return bound / std::max(std::sqrt(sum), bound);
}

double Updater::learning_rate_after(std::int64_t ahead) const {
  return rate_override_ ? *rate_override_
                        : LearningRate(optimizer_.options().learning_rate.at(iterations_ + ahead)).at(0);  // checked
}

// LearningRate checks the value.
void Updater::set_learning_rate(double rate) { rate_override_ = LearningRate(rate).at(0); }

at::Tensor Updater::state(std::size_t slot, std::size_t index) const {
  const auto& info = parameters_->slots()[slot];
  auto own = states_.own.state(slot, index);
  if (ownership_.is_sharded() && !other_states_.empty()) {
    std::vector<at::Tensor> parts{own.cpu()};
    for (const auto& other : other_states_) parts.push_back(other.state(slot, index).cpu());
    own = at::cat(parts);
  }
  return own.numel() == info.numel ? own.view(info.sizes) : own;
}

at::Tensor Updater::whole_state(std::size_t slot, std::size_t index) const {
  return ownership_.gather_slot(slot, parameters_->slots()[slot].sizes, state(slot, index));
}

std::vector<std::pair<at::Tensor, at::Tensor>> Updater::parts_of(std::size_t slot, std::size_t index,
                                                                 const at::Tensor& whole) const {
  std::vector<std::pair<at::Tensor, at::Tensor>> parts;
  const auto flat = whole.reshape({-1});
  const auto add = [&](const ShardState& states) {
    const auto shard = states.owned(slot);
    if (shard.count > 0) parts.emplace_back(states.state(slot, index), flat.narrow(0, shard.begin, shard.count));
  };
  add(states_.own);
  add(states_.copies);
  for (const auto& other : other_states_) add(other);
  return parts;
}

}  // namespace lockstep::gradient
