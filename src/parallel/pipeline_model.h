// A model that is cut into stages, for fit.
#pragma once

#include <functional>
#include <memory>

#include "gradient/parameter_parts.h"
#include "lockstep/parallel/pipeline.h"
#include "parallel/mesh_parallelism.h"
#include "train/layers/stack.h"

namespace lockstep::parallel {

class PipelineModel {
 public:
  // Collective over the mesh: makes the stages, and before them all layers once, if they are measured, on `sample`
  // [examples, ...]. Initial values are those that `make` draws in its first call. Stages go to `device`. Throws
  // InvalidArgument as Pipeline, cut_stages, parallelize_module and fully_shard.
  PipelineModel(const MeshParallelism& parallelism, const std::function<train::Layers()>& make, const Tensor& sample,
                at::Device device);

  // This rank's layers under their names in the model, and what it trains of them.
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  const gradient::ModelPart& split() const { return split_; }

  // Call Pipeline's. Where parameters are sharded over pipelines, each has as many microbatches as all have examples
  // for: collective over the pipelines.
  void forward_backward(const Tensor& x, const MicrobatchLoss& loss);
  Tensor forward(const Tensor& x);

  const Communicator& workers() const { return workers_; }  // of the pipeline

 private:
  std::int64_t most_microbatches(std::int64_t examples) const;

  const Communicator workers_;
  std::shared_ptr<Pipeline> pipeline_;
  std::shared_ptr<torch::nn::Module> module_;
  gradient::ModelPart split_;
};

}  // namespace lockstep::parallel
