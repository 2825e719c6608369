// The state of an optimizer's rule for some shards of the parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <type_traits>
#include <vector>

#include "gradient/ownership.h"
#include "gradient/replicated_parameters.h"
#include "lockstep/optimizer/optimizer.h"

namespace lockstep::gradient {

// True where the updates need all sums of gradients before the first update.
inline bool clips_by_norm(const Optimizer& optimizer) {
  return optimizer.options().clipnorm || optimizer.options().global_clipnorm;
}

// In flat buffers; each shard begins at a cache line. Constant but for the values.
class ShardState {
 public:
  // With the rule's initial values, where the values of copy `copy` are.
  ShardState(const ReplicatedParameters& parameters, const Optimizer& optimizer, ShardMap shards, int copy = 0);

  // Takes the values of another state of the same shards.
  void copy_from(const ShardState& other);

  const ShardMap& shards() const { return shards_; }

  // How many states the rule has.
  std::size_t states() const { return float_.size(); }

  // State `index` (of the rule's states()) of elements of a shard of `shards()`: the stored values. T: the slot's
  // dtype.
  template <class T>
  T* state(const Shard& part, std::size_t index) const {
    const auto& flat = std::is_same_v<T, double> ? double_[index] : float_[index];
    return flat.template mutable_data_ptr<T>() + place_of(part);
  }

  // State `index` of all elements of the slot's shard, which may be none: flat.
  at::Tensor state(std::size_t slot, std::size_t index) const;

  // Room for the sums of gradients of elements of a shard, where the optimizer clips by a norm. T: the slot's dtype.
  template <class T>
  T* summed(const Shard& part) const {
    const auto& flat = std::is_same_v<T, double> ? summed_double_ : summed_float_;
    return flat.template mutable_data_ptr<T>() + place_of(part);
  }

  at::ScalarType dtype(std::size_t slot) const { return owned_[slot].dtype; }

  // The shard of a slot; 0 elements where there is none.
  Shard owned(std::size_t slot) const { return {slot, owned_[slot].begin, owned_[slot].count}; }

  std::uint64_t hash() const;
  std::int64_t bytes() const;

 private:
  std::int64_t place_of(const Shard& part) const {
    const auto& owned = owned_[part.slot];
    return owned.place + part.begin - owned.begin;
  }

  struct Owned {
    at::ScalarType dtype = at::kFloat;
    std::int64_t begin = 0, count = 0, place = 0;  // place: in the flat buffers
  };
  ShardMap shards_;
  std::vector<Owned> owned_;                // [slot]
  std::vector<at::Tensor> float_, double_;  // [state]
  at::Tensor summed_float_, summed_double_;
};

}  // namespace lockstep::gradient
