// Steps of a model that is cut into the stages of a pipeline, one or more of them on each worker.
#pragma once

#include "parallel/pipeline_model.h"
#include "train/threaded_execution.h"

namespace lockstep::train {

class StagedExecution final : public ThreadedExecution {
 public:
  // `stages` must outlive it.
  StagedExecution(ModelImpl& impl, parallel::PipelineModel& stages) : ThreadedExecution(impl), stages_(stages) {}

 protected:
  ComputedStep compute_gradients(ReplicaContext& replica, const Example& part, Tracker& tracker,
                                 StepTimes& spent) override;
  void compute_zeros(int replica, const Example& part, const LossOf& loss_of) override;
  Tensor forward(int replica, const Tensor& x) const override;
  AddedLosses::Use losses_in_evaluation() const override { return AddedLosses::Use::refused; }

 private:
  parallel::PipelineModel& stages_;
};

}  // namespace lockstep::train
