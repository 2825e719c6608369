// How ModelParallelStrategy splits models over its mesh.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/parallel/context_parallel.h"
#include "lockstep/parallel/model_parallel_strategy.h"
#include "strategy/strategy_impl.h"

namespace lockstep::parallel {

// The parameters and buffers of a module that is not divided yet, a line each.
std::string describe_parameters(const torch::nn::Module& module);

class MeshParallelism final : public strategy::Kind {
 public:
  // Collective over the mesh. Throws InvalidArgument as ModelParallelStrategy.
  MeshParallelism(DeviceMesh mesh, ModelParallelOptions options);

  Topology topology() const override { return topology_; }
  void connect(Topology& topology, const strategy::WorkerSettings& workers, const Timeouts& timeouts) const override;
  void reconnect(const Topology& topology, const strategy::WorkerSettings& workers,
                 const Timeouts& timeouts) const override;
  void begin(StrategyImpl& strategy) override;
  std::string describe() const override;

  // Splits a model that is one module; each process has one replica. Throws InvalidArgument where models are cut into
  // stages.
  std::shared_ptr<ReplicatedParameters> replicate(
      StrategyImpl& strategy, const std::vector<std::shared_ptr<torch::nn::Module>>& modules) const override;
  std::shared_ptr<train::Execution> execution(ModelImpl& model) const override;

  // The processes of the mesh; null where it was made of a Communicator.
  std::shared_ptr<elastic::Membership> membership() const { return mesh_.membership(); }

  // True where models are cut into stages, by PipelineModel.
  bool has_stages() const { return mesh_.contains(options_.pipeline_axis); }
  const ModelParallelOptions& options() const { return options_; }

  // True where layers have experts on other ranks: a rank without examples then computes with no tokens.
  bool has_experts() const { return expert_.size() > 1; }

  // This rank's positions of the sequences, and what must live while it computes with them; the whole of an output.
  // Nothing changes without such an axis; else `whole_positions` is collective over topology().positions. own_positions
  // throws InvalidArgument for a tensor that cannot be divided, and where sequences have not so many `positions` as
  // ModelPart says.
  Example own_positions(const Example& whole, std::int64_t positions) const;
  std::unique_ptr<ContextParallel> use_context() const;
  Tensor whole_positions(const Tensor& part) const;

  // `divide` divides the layers of a stage, or model, over the ranks for tensors; then `shard` shards this rank's part,
  // and says what it trains. Patterns that match nothing in the module are left out; others are added to `used`.
  void divide(torch::nn::Module& module, std::set<std::string>& used) const;
  gradient::ModelPart shard(torch::nn::Module& module, std::set<std::string>& used) const;

  // Throws InvalidArgument for a pattern of the options that is not in `used`, with the most similar of the names.
  void check_used(const std::set<std::string>& used, const std::set<std::string>& names) const;

 private:
  gradient::ModelPart split(torch::nn::Module& module) const;
  bool has_shards() const { return shard_.size() > 1; }
  std::vector<std::string> axes_with_other_examples() const;
  std::vector<std::string> axes_with_other_tokens() const;

  const DeviceMesh mesh_;
  const ModelParallelOptions options_;
  const Communicator shard_, expert_;
  // Products of axes: the ranks with the same shard; and those over which gradients are summed after backward, by split
  // modules themselves.
  const Communicator copies_, summed_;
  Topology topology_;
};

}  // namespace lockstep::parallel
