// fully_shard: each rank has a part of the parameters, of their gradients and of the optimizer's state (ZeRO stage 3;
// Rajbhandari et al. 2020, Zhao et al. 2023). Follows torch.distributed.fsdp.fully_shard.
//
//   auto sharded = lockstep::fully_shard(net, mesh["data"], {.units = {"blocks.*"}});
//   torch::optim::AdamW adamw(sharded.parameters());  // of this rank's part
//
//   adamw.zero_grad();
//   torch::cross_entropy_loss(sharded(x), y).backward();
//   adamw.step();
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/buffer.h"
#include "lockstep/collective/communicator.h"
#include "lockstep/gradient/recorded_forward.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/strategy/module_factory.h"

namespace lockstep {
namespace parallel {
class ShardedUnits;
}

struct FullyShardOptions {
  // Submodules whose parameters are gathered together, when needed, by patterns as in parallelize_module. Other
  // parameters are gathered for the whole of a step. More units take less memory, and more messages.
  std::vector<std::string> units = {};

  // Gives up a unit's parameters after its forward, and gathers them again for its backward (stage 3). Else they stay
  // until its backward has ended (stage 2).
  bool reshard_after_forward = true;

  // Ranks that have the same shards: their gradients are averaged too. With fully_shard inside each host and replicas
  // on all hosts, parameters are gathered inside hosts alone. Follows HSDP.
  Communicator replicas = {};

  // Gathers the parameters of the next unit while one computes, in the order of the step before. For ranks on several
  // hosts; needs the memory of one more unit.
  bool prefetch = false;

  // float16 or bfloat16: parameters of float32 are gathered in param_dtype, in which operators compute, and gradients
  // are summed in reduce_dtype. Shards stay float32 for the optimizer. Empty: float32, and as param_dtype. Give the
  // module inputs of param_dtype, or call it with autocast; with fit set_global_policy("mixed_bfloat16"). Follows
  // MixedPrecisionPolicy of PyTorch's fully_shard.
  std::optional<DType> param_dtype = {}, reduce_dtype = {};

  // For a module on a GPU: shards and their gradients are in host memory, where the optimizer has its state and updates
  // them. The GPU has only the units that are gathered, and their gradients until they are summed. With fit it is
  // always so. Follows CPUOffloadPolicy of PyTorch's fully_shard.
  bool cpu_offload = false;
};

// The shards of a module's parameters. A parameter of the module has values only while operators use it. They are
// gathered when an operator of forward or backward first reads it, and given up when one reads parameters of other
// units alone. So all ranks call the same operators, on units in the same order, and the module's code stays as it is.
// Functions that take the address of a parameter's values without an operator of LibTorch cannot be used in the module,
// nor can a backward inside backward: recompute activations with lockstep::recompute. torch::save of the module writes
// no values: save what `gather` returns. Optimizers get `parameters()`: one of the module's own parameters would change
// nothing. On a GPU the Group moves values and gradients, and the host waits for none of it.
//
// After an exception in backward call release(), or the module's forward, before the next one.
//
// One thread a rank. Calls that communicate are marked as collective; they throw what a Group throws.
class FullyShardedParameters {
 public:
  explicit FullyShardedParameters(const Communicator& ranks, FullyShardOptions options = {});
  FullyShardedParameters(FullyShardedParameters&&) noexcept = default;
  FullyShardedParameters& operator=(FullyShardedParameters&&) = delete;

  // Collective. Makes a unit of the module's parameters that are in none yet: gives all ranks rank 0's values, keeps
  // this rank's part, and frees the rest. To make a model that does not fit whole, add each part as soon as it is made.
  // `keep`: gathered for the whole of a step. All get rank 0's buffers too, which stay as they are from then on. Throws
  // InvalidArgument, on all ranks, where ranks differ in names, shapes or dtypes, and for a name that is there already.
  // Throws it also for a parameter that is not dense, and where this module's parameters are on several devices. Load,
  // move and parallelize_module a module before.
  void add(torch::nn::Module& module, const std::string& name = "", bool keep = false);

  // This rank's part of each parameter that has one, flat, on the parameter's device or, with cpu_offload, in host
  // memory. They are leaves of autograd's graph. Backward sets their gradients to the mean over all ranks, weighted by
  // examples. The next backward after zero_grad overwrites the gradients' memory. They have none where no rank has any.
  const std::vector<Tensor>& parameters() const;

  // Adds to the number of examples for which the next backward counts on this rank, beside the examples of forwards
  // through FullySharded. Calls since the last backward add up. Without any number all ranks count the same. But a
  // backward without one throws InvalidArgument with FullySharded, and after a backward that was told one. In a
  // Pipeline, whose steps have many backwards, scale the losses instead. Ignored where gradients are off.
  void add_examples(double examples);

  // Gives up what is gathered, so that the next forward reads the shards as they are now. FullySharded does so before
  // each forward.
  void release();

  // Collective, also over `stages`: scales the gradients of the shards as lockstep::clip_grad_norm, and returns the
  // norm.
  double clip_grad_norm(double max_norm, const Communicator& stages = {});

  // Collective. The values of all parameters by name, as the module has them (a part, where parallelize_module divided
  // it), on rank 0, in host memory; elsewhere nothing.
  std::map<std::string, Tensor> gather() const;

  // Collective. Sets the values to those of rank 0, by name; elsewhere `values` is not read. Throws InvalidArgument, on
  // all ranks, where a name is missing or has another shape.
  void load(const std::map<std::string, Tensor>& values);

 protected:
  // Calls `release`, and begins a forward, whose operators are recorded until the result ends. `examples`: how many the
  // forward's inputs have; empty where they do not tell.
  internal::RecordedForward begin_forward(std::optional<double> examples);

  // From now on a backward counts by the examples of the forwards in its graph, and is refused without any.
  void expect_forwards();

 private:
  std::shared_ptr<parallel::ShardedUnits> units_;
};

// The module with its shards. Call the module through this, `sharded(x)`. `sharded->forward(x)` is the module's own
// forward, of which this object does not know: its backward throws InvalidArgument. On ranks that have shards, the
// module's own forward throws Error where an operator, such as an optimizer's, has changed shards since the values were
// gathered: call release() before. A change without an operator of LibTorch is not seen.
template <class M>
class FullySharded : public FullyShardedParameters {
 public:
  FullySharded(std::shared_ptr<M> module, FullyShardedParameters parameters)
      : FullyShardedParameters(std::move(parameters)), module_(std::move(module)) {
    expect_forwards();
  }

  // The module's forward. The first dimension of the first tensor counts the examples, as in DistributedDataParallel.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    const auto forward = begin_forward(internal::examples_in(/*batch_dim=*/0, inputs...));
    return forward.result(module_->forward(inputs...));
  }
  template <class... Inputs>
  auto forward(const Inputs&... inputs) {
    return (*this)(inputs...);
  }

  M* operator->() const { return module_.get(); }
  M& operator*() const { return *module_; }

 private:
  std::shared_ptr<M> module_;
};

namespace internal {

FullyShardedParameters fully_shard(torch::nn::Module& module, const Communicator& ranks, FullyShardOptions options);

}  // namespace internal

// Collective. Throws InvalidArgument for a pattern that no submodule matches, and as FullyShardedParameters::add.
template <class Holder>
requires internal::ModuleHolder<Holder>
auto fully_shard(const Holder& module, const Communicator& ranks, FullyShardOptions options = {}) {
  auto pointer = internal::module_of(module);
  return FullySharded(pointer, internal::fully_shard(*pointer, ranks, std::move(options)));
}

}  // namespace lockstep
