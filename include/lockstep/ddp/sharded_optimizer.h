// ShardedOptimizer: an optimizer of torch::optim whose state is divided among the ranks. Each updates its share of the
// parameters and sends the new values to the others, so that with N ranks each needs 1/N of the memory for state.
//
//   lockstep::DistributedDataParallel ddp(net, group);
//   lockstep::ShardedOptimizer<torch::optim::Adam> adam(ddp, torch::optim::AdamOptions(1e-3));
//
//   adam.zero_grad();
//   torch::cross_entropy_loss(ddp(x), y).backward();
//   adam.step();
//
// Follows torch.distributed.optim.ZeroRedundancyOptimizer, but parameters are cut, so that shares are equal whatever
// their sizes are. ZeRO stage 1: Rajbhandari et al., SC 2020.
#pragma once

#include <torch/serialize.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/ddp/sharded_parameters.h"

namespace lockstep {

// `Optimizer`: torch::optim::SGD, Adam, AdamW, RMSprop or Adagrad. One thread a rank; all ranks make the same calls,
// and what is collective throws what the Group throws.
//
// A rank that is lost takes its state with it: begin again from what `consolidate` gave. Make the optimizer when the
// parameters are where they stay (after to(device)); else step throws Error.
template <class Optimizer>
class ShardedOptimizer {
 public:
  using Options = typename internal::Shardable<Optimizer>::Options;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  // Collective. The caller reduces the gradients before each step. Parameters are float or double, the same on all
  // ranks; else throws InvalidArgument.
  ShardedOptimizer(const Groups& groups, Communicator ranks, Options defaults);
  ShardedOptimizer(std::vector<at::Tensor> parameters, Communicator ranks, Options defaults)
      : ShardedOptimizer(Groups{torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(ranks),
                         std::move(defaults)) {}

  // For `ddp`; takes all its parameters that require gradients where no groups are given. In
  // DistributedDataParallel::join a rank that is done takes part in the others' steps. There one step of each optimizer
  // follows each backward with sync, in the order of construction, with nothing in between. A rank that is done would
  // not see clipping or a change of options.
  ShardedOptimizer(DistributedGradients& ddp, const Groups& groups, Options defaults);
  ShardedOptimizer(DistributedGradients& ddp, Options defaults)
      : ShardedOptimizer(ddp, Groups{torch::optim::OptimizerParamGroup(ddp.trained_parameters())},
                         std::move(defaults)) {}

  // Collective: updates this rank's shards, and gathers all values.
  void step() { core_->step(); }

  // For the whole parameters.
  void zero_grad(bool set_to_none = true);

  // The optimizer of this rank's shards, in groups as they were given: for torch::optim::LRScheduler, or to change
  // options, on all ranks alike.
  Optimizer& local() { return core_->local; }

  // Collective. On rank `root` an optimizer of the whole parameters with all state, for torch::save; elsewhere null.
  std::unique_ptr<Optimizer> consolidate(int root = 0) const;

  // Not collective. Takes the options, and this rank's shards of the state, of an optimizer of the whole parameters:
  // one that torch::load filled, saved from `consolidate` on any number of ranks. Throws InvalidArgument where it has
  // other parameters; then nothing has changed.
  void load(const Optimizer& whole);

  // Memory of this rank's state.
  std::int64_t state_bytes() const;

 private:
  using Shardable = internal::Shardable<Optimizer>;
  using State = typename Shardable::State;

  struct Core final : internal::CollectiveStep {
    Core(const Groups& all, Communicator ranks, Options options);
    void step() override;

    const Groups groups;
    const Options defaults;
    internal::ShardedParameters parameters;
    const std::vector<at::Tensor> shards;  // this rank's, as `parameters` has them
    Optimizer local;
  };

  static std::vector<at::Tensor> parameters_of(const Groups& groups);
  static Groups groups_of(const Groups& groups, const Groups& options, const std::vector<at::Tensor>& tensors);
  static State* state_of(const Optimizer& optimizer, const at::Tensor& parameter);
  std::unique_ptr<State> joined(std::size_t parameter, const std::vector<State*>& parts) const;

  const std::shared_ptr<Core> core_;
};

}  // namespace lockstep

#include "lockstep/ddp/sharded_optimizer_templates.h"
