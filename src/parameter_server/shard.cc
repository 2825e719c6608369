#include "parameter_server/shard.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

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
    state.push_back(with_element(dtype, [&]<class T>(T) { return filled<T>(count, spec.initial_value); }));
  }
  return state;
}

// Far from that of any other shard.
std::int64_t first_version() {
  static std::random_device random;
  static Mutex mutex;
  MutexLock lock(mutex);
  return 1 + static_cast<std::int64_t>((std::uint64_t{random()} << 32 | random()) >> 2);
}

}  // namespace

Shard::Shard(Memory values, std::size_t count, DType dtype, Optimizer optimizer)
    : count_(count),
      dtype_(dtype),
      optimizer_(std::move(optimizer)),
      data_{.values = std::move(values),
            .state = initial_state(optimizer_, count, dtype),
            .applied = {},
            .version = first_version()} {
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

UpdateStep next_update(const Optimizer& optimizer, std::int64_t updates_before, std::optional<double> learning_rate) {
  const double rate = learning_rate ? *learning_rate : optimizer.options().learning_rate.at(updates_before);
  return {updates_before + 1, LearningRate(rate).at(0)};  // checked
}

bool Shard::apply(std::int64_t step, std::span<const std::byte* const> gradients, double divide_by,
                  std::optional<double> learning_rate) {
  MutexLock lock(mutex_);
  if (data_.applied.contains(step)) return false;
  apply(data_, step, gradients, divide_by, learning_rate);
  if (cut_ && step < end_of_cut_) apply(*cut_, step, gradients, divide_by, learning_rate);
  return true;
}

void Shard::apply(Data& data, std::int64_t step, std::span<const std::byte* const> gradients, double divide_by,
                  std::optional<double> learning_rate) const {
  const auto update_step = next_update(optimizer_, data.applied.count(), learning_rate);
  if (!gradients.empty()) {
    with_element(dtype_, [&]<class T>(T) { update<T>(data, gradients, divide_by, update_step); });
    ++data.version;
  }
  data.applied.add(step);
}

template <class T>
void Shard::update(const Data& data, std::span<const std::byte* const> gradients, double divide_by,
                   const UpdateStep& step) const {
  std::vector<const T*> sources;
  for (const auto* const gradient : gradients) sources.push_back(reinterpret_cast<const T*>(gradient));
  std::vector<T*> state;
  for (const auto& memory : data.state) state.push_back(reinterpret_cast<T*>(memory.get()));
  T* const values = reinterpret_cast<T*>(data.values.get());
  optimizer::reduce_and_update<T>(optimizer_, step, {divide_by, optimizer_.options().clipvalue},
                                  {sources, std::span(&values, 1), state, count_});
}

void Shard::close_below(std::int64_t end) {
  MutexLock lock(mutex_);
  data_.applied.close_below(end);
}

std::int64_t Shard::read(std::byte* values, std::int64_t known) const {
  MutexLock lock(mutex_);
  if (known != data_.version) std::memcpy(values, data_.values.get(), bytes());
  return data_.version;
}

void Shard::write(const std::byte* values) {
  MutexLock lock(mutex_);
  std::memcpy(data_.values.get(), values, bytes());
  ++data_.version;
}

std::int64_t Shard::steps() const {
  MutexLock lock(mutex_);
  return data_.applied.count();
}

void Shard::cut(std::int64_t end) {
  const auto copy = [this](const Memory& memory) {
    auto copied = collective::private_memory(bytes());
    std::memcpy(copied.get(), memory.get(), bytes());
    return copied;
  };
  MutexLock lock(mutex_);
  cut_.reset();  // before there is another copy
  cut_ = Data{.values = copy(data_.values), .state = {}, .applied = data_.applied, .version = data_.version};
  for (const auto& memory : data_.state) cut_->state.push_back(copy(memory));
  end_of_cut_ = end;
}

std::optional<Shard::State> Shard::take_cut(std::int64_t end) {
  std::optional<Data> cut;
  {
    MutexLock lock(mutex_);
    cut = std::exchange(cut_, std::nullopt);
    if (cut) data_.applied.close_below(end);
  }
  if (!cut) return std::nullopt;
  const auto bytes_of = [this](const Memory& memory) { return std::vector(memory.get(), memory.get() + bytes()); };
  State state{.values = bytes_of(cut->values), .updates = cut->applied.count()};
  for (const auto& memory : cut->state) state.optimizer.push_back(bytes_of(memory));
  return state;
}

void Shard::check(const State& state) const {
  const auto fits = [this](const std::vector<std::byte>& data) { return data.size() == bytes(); };
  const auto states = optimizer_.rule().states().size();
  if (fits(state.values) && state.optimizer.size() == states &&
      std::all_of(state.optimizer.begin(), state.optimizer.end(), fits)) {
    return;
  }
  throw InvalidArgument(text("a shard of ", count_, " x ", name_of(dtype_), " with ", states,
                             " arrays of state cannot be restored from ", state.values.size(), " bytes with ",
                             state.optimizer.size()));
}

void Shard::restore(const State& state, std::int64_t end) {
  check(state);
  MutexLock lock(mutex_);
  cut_.reset();
  std::copy(state.values.begin(), state.values.end(), data_.values.get());
  for (std::size_t i = 0; i < state.optimizer.size(); ++i) {
    std::copy(state.optimizer[i].begin(), state.optimizer[i].end(), data_.state[i].get());
  }
  data_.applied = AppliedSteps::saved({end, state.updates});
  ++data_.version;
}

void Shard::send(StateWriter& to) const {
  std::vector<std::vector<std::byte>> arrays;
  AppliedSteps applied;
  {
    MutexLock lock(mutex_);
    const auto copy = [&](const Memory& memory) { arrays.emplace_back(memory.get(), memory.get() + bytes()); };
    copy(data_.values);
    for (const auto& memory : data_.state) copy(memory);
    applied = data_.applied;
  }
  to.number(static_cast<std::int64_t>(bytes()));
  for (const auto& array : arrays) to.bytes(array);
  applied.send(to);
}

void Shard::receive(StateReader& from) {
  MutexLock lock(mutex_);
  cut_.reset();
  from.expect(static_cast<std::int64_t>(bytes()));
  from.bytes({data_.values.get(), bytes()});
  for (const auto& memory : data_.state) from.bytes({memory.get(), bytes()});
  data_.applied = AppliedSteps::received(from);
  ++data_.version;
}

}  // namespace lockstep::parameter_server
