// Steps of models that ModelParallelStrategy splits over its mesh.
#pragma once

#include <memory>

#include "parallel/mesh_parallelism.h"
#include "parallel/pipeline_model.h"
#include "train/threaded_execution.h"

namespace lockstep::parallel {

// Each rank computes its part of a model, for its part of a batch.
class MeshExecution : public train::ThreadedExecution {
 public:
  // Both must outlive it.
  MeshExecution(ModelImpl& impl, const MeshParallelism& mesh) : ThreadedExecution(impl), mesh_(mesh) {}

 protected:
  train::ComputedStep compute_gradients(ReplicaContext& replica, const Example& part, train::Tracker& tracker,
                                        StepTimes& spent) override;
  void compute_zeros(int replica, const Example& part, const LossOf& loss_of) override;
  void check_loss() const override;
  Tensor outputs_of_any(int replica, const Example& part) const override;
  Example own_part(const Example& part) const override;
  Tensor whole(const Tensor& outputs) const override { return mesh_.whole_positions(outputs); }
  bool computes_with_no_tokens() const override { return mesh_.has_experts(); }

  // Warns once where a step's model computed no attention in its context, which may be null.
  void warn_without_attention(const ContextParallel* context);

  const MeshParallelism& mesh_;

 private:
  bool warned_of_context_ = false;
};

// Each rank computes some stages of a pipeline.
class StagedExecution final : public MeshExecution {
 public:
  using MeshExecution::MeshExecution;

  std::shared_ptr<ReplicatedParameters> make_parameters(const Example& sample) override;

 protected:
  train::ComputedStep compute_gradients(ReplicaContext& replica, const Example& part, train::Tracker& tracker,
                                        StepTimes& spent) override;
  void compute_zeros(int replica, const Example& part, const LossOf& loss_of) override;
  Tensor forward(int replica, const Tensor& x) const override;
  train::AddedLosses::Use losses_in_evaluation() const override { return train::AddedLosses::Use::refused; }

 private:
  std::unique_ptr<PipelineModel> stages_;  // null before make_parameters
};

}  // namespace lockstep::parallel
