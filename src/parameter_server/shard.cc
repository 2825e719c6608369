#include "parameter_server/shard.h"

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "collective/backend.h"
#include "lockstep/base/error.h"
#include "optimizer/flat_update.h"

namespace lockstep::parameter_server {
namespace {

template <class T>
Memory filled(std::size_t count, double value) {
  const auto memory = collective::private_memory(count * sizeof(T));
  std::fill_n(reinterpret_cast<T*>(memory.get()), count, static_cast<T>(value));
  return memory;
}

std::vector<Memory> initial_state(const Optimizer& optimizer, std::size_t count, DType dtype) {
  std::vector<Memory> state;
  for (const auto& spec : optimizer.rule().states()) {
    state.push_back(dtype == DType::float64 ? filled<double>(count, spec.initial_value)
                                            : filled<float>(count, spec.initial_value));
  }
  return state;
}

}  // namespace

Shard::Shard(Memory values, std::size_t count, DType dtype, Optimizer optimizer)
    : count_(count),
      dtype_(dtype),
      optimizer_(std::move(optimizer)),
      values_(std::move(values)),
      state_(initial_state(optimizer_, count, dtype)) {
  require_shardable(optimizer_);
}

void require_shardable(const Optimizer& optimizer) {
  const auto& options = optimizer.options();
  if (options.clipnorm || options.global_clipnorm || options.loss_scale) {
    throw InvalidArgument(
        "an optimizer on a parameter server has clipnorm, global_clipnorm or a loss scale; a server has a part of a "
        "gradient alone, so only clipvalue is possible");
  }
}

bool Shard::apply(std::int64_t step, std::span<const std::byte* const> gradients, double divide_by,
                  std::optional<double> learning_rate) {
  MutexLock lock(mutex_);
  if (applied_.contains(step)) return false;
  const auto updates = applied_.count();
  const double rate = learning_rate ? *learning_rate : optimizer_.options().learning_rate.at(updates);
  const UpdateStep update_step{updates + 1, LearningRate(rate).at(0)};  // checked
  if (!gradients.empty() && dtype_ == DType::float64) update<double>(gradients, divide_by, update_step);
  if (!gradients.empty() && dtype_ == DType::float32) update<float>(gradients, divide_by, update_step);
  return applied_.add(step);
}

template <class T>
void Shard::update(std::span<const std::byte* const> gradients, double divide_by, const UpdateStep& step) {
  std::vector<const T*> sources;
  for (const auto* const gradient : gradients) sources.push_back(reinterpret_cast<const T*>(gradient));
  std::vector<T*> state;
  for (const auto& memory : state_) state.push_back(reinterpret_cast<T*>(memory.get()));
  T* const values = reinterpret_cast<T*>(values_.get());
  optimizer::reduce_and_update<T>(optimizer_, step, {divide_by, optimizer_.options().clipvalue},
                                  {sources, std::span(&values, 1), state, count_});
}

std::int64_t Shard::read(std::byte* values) const {
  MutexLock lock(mutex_);
  std::memcpy(values, values_.get(), bytes());
  return applied_.count();
}

void Shard::write(const std::byte* values) {
  MutexLock lock(mutex_);
  std::memcpy(values_.get(), values, bytes());
}

std::int64_t Shard::version() const {
  MutexLock lock(mutex_);
  return applied_.count();
}

Shard::State Shard::state() const {
  const auto copy = [this](const Memory& memory) { return std::vector(memory.get(), memory.get() + bytes()); };
  MutexLock lock(mutex_);
  State state{.values = copy(values_), .applied = applied_.numbers()};
  for (const auto& memory : state_) state.optimizer.push_back(copy(memory));
  return state;
}

void Shard::restore(const State& state) {
  const auto fits = [this](const std::vector<std::byte>& data) { return data.size() == bytes(); };
  if (!fits(state.values) || state.optimizer.size() != state_.size() ||
      !std::all_of(state.optimizer.begin(), state.optimizer.end(), fits)) {
    throw InvalidArgument(text("a shard of ", count_, " x ", name_of(dtype_), " with ", state_.size(),
                               " arrays of state cannot be restored from ", state.values.size(), " bytes with ",
                               state.optimizer.size()));
  }
  MutexLock lock(mutex_);
  std::copy(state.values.begin(), state.values.end(), values_.get());
  for (std::size_t i = 0; i < state_.size(); ++i) {
    std::copy(state.optimizer[i].begin(), state.optimizer[i].end(), state_[i].get());
  }
  applied_ = AppliedSteps(state.applied);
}

}  // namespace lockstep::parameter_server
