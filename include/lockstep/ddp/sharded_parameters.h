// Internals of ShardedOptimizer: not for users' programs.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

#include "lockstep/collective/communicator.h"

namespace lockstep::internal {

// Parameters, cut into an equal share of their elements for each rank.
class ShardedParameters {
 public:
  // Collective. Throws InvalidArgument, on all ranks, where parameters differ in shape or dtype, and for one that is
  // not float or double, has gaps in its memory, or is there twice.
  ShardedParameters(std::vector<at::Tensor> parameters, Communicator ranks);
  ~ShardedParameters();

  const Communicator& ranks() const;

  // Throws Error where ranks were lost since construction, as their state is lost with them, or where a parameter's
  // values lie in other memory.
  void require_as_made() const;

  // The rank's part of `whole`, flat, in the order of parameter i's memory. A view where `whole` has the parameter's
  // strides, else a copy. Undefined for none.
  at::Tensor shard(std::size_t i, int rank, const at::Tensor& whole) const;

  // The shards of all parameters: leaves of autograd's graph.
  std::vector<at::Tensor> shards(int rank) const;

  // Parameter i, put together from all ranks' shards.
  at::Tensor joined(std::size_t i, const std::vector<at::Tensor>& shards) const;

  // Gives this rank's shards the gradients of their parameters.
  void take_gradients(const std::vector<at::Tensor>& shards) const;

  // Collective: all ranks get the values of all shards. Throws what the Group throws.
  void gather_values();

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

// Options and state of an optimizer whose rule treats every element alike; `tensors`: those of a parameter's state.
template <class Optimizer>
struct Shardable;

template <>
struct Shardable<torch::optim::SGD> {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static std::vector<at::Tensor*> tensors(State& state) { return {&state.momentum_buffer()}; }
};

template <>
struct Shardable<torch::optim::Adam> {
  using Options = torch::optim::AdamOptions;
  using State = torch::optim::AdamParamState;
  static std::vector<at::Tensor*> tensors(State& state) {
    return {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()};
  }
};

template <>
struct Shardable<torch::optim::AdamW> {
  using Options = torch::optim::AdamWOptions;
  using State = torch::optim::AdamWParamState;
  static std::vector<at::Tensor*> tensors(State& state) {
    return {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()};
  }
};

template <>
struct Shardable<torch::optim::RMSprop> {
  using Options = torch::optim::RMSpropOptions;
  using State = torch::optim::RMSpropParamState;
  static std::vector<at::Tensor*> tensors(State& state) {
    return {&state.square_avg(), &state.momentum_buffer(), &state.grad_avg()};
  }
};

template <>
struct Shardable<torch::optim::Adagrad> {
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static std::vector<at::Tensor*> tensors(State& state) { return {&state.sum()}; }
};

}  // namespace lockstep::internal
