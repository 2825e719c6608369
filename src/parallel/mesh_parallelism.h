// How ModelParallelStrategy splits models over its mesh.
#pragma once

#include <set>
#include <string>

#include "lockstep/parallel/model_parallel_strategy.h"
#include "strategy/model_parallelism.h"

namespace lockstep::parallel {

// The parameters of a module that is not divided yet, a line each.
std::string describe(const torch::nn::Module& module);

class MeshParallelism final : public strategy::ModelParallelism {
 public:
  // Collective over the mesh. Throws InvalidArgument as ModelParallelStrategy.
  MeshParallelism(DeviceMesh mesh, ModelParallelOptions options);

  const Communicator& workers() const override { return mesh_.ranks(); }
  const Communicator& data_workers() const override { return data_; }
  const Communicator& gradient_workers() const override { return has_shards() ? alone_ : data_; }
  const Communicator& same_part_workers() const override { return batch_; }
  int row_size() const override { return row_size_; }
  void regroup(const Job& job, double timeout_seconds) const override;
  bool computes_without_examples() const override { return has_shards() || has_stages(); }
  bool counts() const override { return tensor_.rank() == 0 && pipeline_.rank() == last_stage_; }

  // Of a model that is one module. Throws InvalidArgument where models are cut into stages.
  gradient::SplitModule split(torch::nn::Module& module) const override;

  // Whether models are cut into stages, by PipelineModel.
  bool has_stages() const { return mesh_.contains(options_.pipeline_axis); }
  const Communicator& pipeline_workers() const { return pipeline_; }
  const ModelParallelOptions& options() const { return options_; }

  // Of a stage, or of a whole model: divides layers over the ranks for tensors; then shards what this rank keeps, and
  // says what it trains. Patterns that match nothing in the module are left out; those that match are added to `used`.
  void divide(torch::nn::Module& module, std::set<std::string>& used) const;
  gradient::SplitModule shard(torch::nn::Module& module, std::set<std::string>& used) const;

  // Throws InvalidArgument for a pattern of the options that is not in `used`, with the most similar of the names.
  void check_used(const std::set<std::string>& used, const std::set<std::string>& names) const;

 private:
  bool has_shards() const { return mesh_.contains(options_.shard_axis); }

  const DeviceMesh mesh_;
  const ModelParallelOptions options_;
  const Communicator alone_, batch_, shard_, data_, tensor_, pipeline_;
  const int row_size_;
  int last_stage_ = 0;  // the rank of the pipeline that has it
};

}  // namespace lockstep::parallel
