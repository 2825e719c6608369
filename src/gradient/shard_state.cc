#include "gradient/shard_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include "gradient/tensor_hash.h"

namespace lockstep::gradient {

ShardState::ShardState(const ReplicatedParameters& parameters, const Optimizer& optimizer, ShardMap shards, int copy)
    : shards_(std::move(shards)), owned_(parameters.slots().size()) {
  FlatLayout floats(at::kFloat), doubles(at::kDouble);
  for (std::size_t i = 0; i < owned_.size(); ++i) owned_[i].dtype = parameters.slots()[i].dtype;
  for (const auto& shard : shards_.owned()) {
    auto& owned = owned_[shard.slot];
    auto& layout = owned.dtype == at::kDouble ? doubles : floats;
    owned = {owned.dtype, shard.begin, shard.count, layout.add(shard.slot, shard.count)};
  }
  const auto flat = [&](const FlatLayout& layout, at::ScalarType dtype, double value) {
    return at::full({layout.numel()}, value, parameters.flat(copy, dtype).options());
  };
  for (const auto& spec : optimizer.rule().states()) {
    float_.push_back(flat(floats, at::kFloat, spec.initial_value));
    double_.push_back(flat(doubles, at::kDouble, spec.initial_value));
  }
  if (clips_by_norm(optimizer)) {
    summed_float_ = flat(floats, at::kFloat, 0);
    summed_double_ = flat(doubles, at::kDouble, 0);
  }
}

void ShardState::copy_from(const ShardState& other) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < states(); ++i) {
    float_[i].copy_(other.float_[i]);
    double_[i].copy_(other.double_[i]);
  }
}

at::Tensor ShardState::state(std::size_t slot, std::size_t index) const {
  const auto& owned = owned_[slot];
  return (owned.dtype == at::kDouble ? double_[index] : float_[index]).narrow(0, owned.place, owned.count);
}

std::uint64_t ShardState::hash() const {
  std::uint64_t hash = 0;
  for (const auto& flat : float_) hash = mix(hash, hash_of(flat));
  for (const auto& flat : double_) hash = mix(hash, hash_of(flat));
  return hash;
}

std::int64_t ShardState::bytes() const {
  std::size_t bytes = 0;
  for (const auto& flat : float_) bytes += flat.nbytes();
  for (const auto& flat : double_) bytes += flat.nbytes();
  return static_cast<std::int64_t>(bytes);
}

}  // namespace lockstep::gradient
