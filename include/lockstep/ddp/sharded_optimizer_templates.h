// The templates of sharded_optimizer.h.
#pragma once

#include <algorithm>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/ddp/sharded_optimizer.h"

namespace lockstep {

template <class Optimizer>
ShardedOptimizer<Optimizer>::Core::Core(const Groups& all, Communicator ranks, Options options)
    : groups(all),
      defaults(std::move(options)),
      parameters(parameters_of(groups), std::move(ranks)),
      shards(parameters.shards(parameters.ranks().rank())),
      local(groups_of(groups, groups, shards), defaults) {}

template <class Optimizer>
void ShardedOptimizer<Optimizer>::Core::step() {
  parameters.require_as_made();
  parameters.take_gradients(shards);
  local.step();
  for (const auto& shard : shards) {
    if (shard.defined()) shard.mutable_grad().reset();
  }
  parameters.gather_values();
}

template <class Optimizer>
ShardedOptimizer<Optimizer>::ShardedOptimizer(const Groups& groups, Communicator ranks, Options defaults)
    : core_(std::make_shared<Core>(groups, std::move(ranks), std::move(defaults))) {}

template <class Optimizer>
ShardedOptimizer<Optimizer>::ShardedOptimizer(DistributedGradients& ddp, const Groups& groups, Options defaults)
    : ShardedOptimizer(groups, ddp.ranks(), std::move(defaults)) {
  ddp.join_steps_of(core_);
}

template <class Optimizer>
void ShardedOptimizer<Optimizer>::zero_grad(bool set_to_none) {
  for (auto& parameter : parameters_of(core_->groups)) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      gradient.reset();
    } else {
      gradient.detach_().zero_();
    }
  }
}

template <class Optimizer>
std::vector<at::Tensor> ShardedOptimizer<Optimizer>::parameters_of(const Groups& groups) {
  std::vector<at::Tensor> all;
  for (const auto& group : groups) all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

// `groups` with `tensors` in place of their parameters, without undefined ones, and the options of `options`.
template <class Optimizer>
auto ShardedOptimizer<Optimizer>::groups_of(const Groups& groups, const Groups& options,
                                            const std::vector<at::Tensor>& tensors) -> Groups {
  Groups made;
  auto next = tensors.begin();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    std::vector<at::Tensor> own;
    for (std::size_t k = 0; k < groups[i].params().size(); ++k, ++next) {
      if (next->defined()) own.push_back(*next);
    }
    made.emplace_back(std::move(own));
    if (options[i].has_options()) made.back().set_options(options[i].options().clone());
  }
  return made;
}

template <class Optimizer>
auto ShardedOptimizer<Optimizer>::state_of(const Optimizer& optimizer, const at::Tensor& parameter) -> State* {
  if (!parameter.defined()) return nullptr;
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : static_cast<State*>(found->second.get());
}

template <class Optimizer>
auto ShardedOptimizer<Optimizer>::joined(std::size_t parameter, const std::vector<State*>& parts) const
    -> std::unique_ptr<State> {
  auto whole = std::make_unique<State>(*parts[0]);
  const auto tensors = Shardable::tensors(*whole);
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    if (!tensors[k]->defined()) continue;
    std::vector<at::Tensor> shards;
    for (auto* const part : parts) shards.push_back(*Shardable::tensors(*part)[k]);
    *tensors[k] = core_->parameters.joined(parameter, shards);
  }
  return whole;
}

template <class Optimizer>
std::unique_ptr<Optimizer> ShardedOptimizer<Optimizer>::consolidate(int root) const {
  core_->parameters.require_as_made();
  const auto& ranks = core_->parameters.ranks();
  std::ostringstream mine;
  torch::save(core_->local, mine);
  const auto saved = ranks.gather(mine.str(), root);
  if (ranks.rank() != root) return nullptr;

  const auto& options = core_->local.param_groups();
  std::vector<std::vector<at::Tensor>> shards;     // [rank][parameter]
  std::vector<std::unique_ptr<Optimizer>> locals;  // [rank]
  for (int rank = 0; rank < ranks.size(); ++rank) {
    shards.push_back(core_->parameters.shards(rank));
    locals.push_back(std::make_unique<Optimizer>(groups_of(core_->groups, options, shards.back()), core_->defaults));
    std::istringstream bytes(saved[static_cast<std::size_t>(rank)]);
    torch::load(*locals.back(), bytes, at::Device(at::kCPU));  // not on the GPUs of the others
  }
  const auto parameters = parameters_of(core_->groups);
  auto whole = std::make_unique<Optimizer>(groups_of(core_->groups, options, parameters), core_->defaults);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    std::vector<State*> parts;
    for (std::size_t rank = 0; rank < locals.size(); ++rank) {
      if (auto* const state = state_of(*locals[rank], shards[rank][i])) parts.push_back(state);
    }
    if (!parts.empty()) whole->state()[parameters[i].unsafeGetTensorImpl()] = joined(i, parts);
  }
  return whole;
}

template <class Optimizer>
void ShardedOptimizer<Optimizer>::load(const Optimizer& whole) {
  core_->parameters.require_as_made();
  const auto mine = parameters_of(core_->groups), theirs = parameters_of(whole.param_groups());
  const auto equal = [](const auto& a, const auto& b, const auto& compare) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), compare);
  };
  const bool same = equal(core_->groups, whole.param_groups(), [&](const auto& a, const auto& b) {
    return equal(a.params(), b.params(), [](const at::Tensor& one, const at::Tensor& other) {
      return one.sizes() == other.sizes() && one.scalar_type() == other.scalar_type();
    });
  });
  if (!same) {
    throw InvalidArgument("ShardedOptimizer::load: the optimizer has parameters of other shapes, dtypes or groups");
  }

  auto& local = core_->local;
  for (std::size_t i = 0; i < core_->groups.size(); ++i) {
    local.param_groups()[i].set_options(whole.param_groups()[i].options().clone());
  }
  local.state().clear();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    auto* const state = state_of(whole, theirs[i]);
    if (state == nullptr || !core_->shards[i].defined()) continue;
    auto own = std::make_unique<State>(*state);
    for (auto* const tensor : Shardable::tensors(*own)) {
      if (tensor->defined()) {
        *tensor = core_->parameters.shard(i, core_->parameters.ranks().rank(), *tensor).clone();
      }
    }
    local.state()[core_->shards[i].unsafeGetTensorImpl()] = std::move(own);
  }
}

template <class Optimizer>
std::int64_t ShardedOptimizer<Optimizer>::state_bytes() const {
  std::size_t bytes = 0;
  for (const auto& shard : core_->shards) {
    auto* const state = state_of(core_->local, shard);
    if (state == nullptr) continue;
    for (const auto* const tensor : Shardable::tensors(*state)) bytes += tensor->defined() ? tensor->nbytes() : 0;
  }
  return static_cast<std::int64_t>(bytes);
}

}  // namespace lockstep
