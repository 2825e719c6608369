// Steps that the threads of this process's replicas compute.
#pragma once

#include "train/added_losses.h"
#include "train/execution.h"
#include "train/recorded_step.h"

namespace lockstep {
class ContextParallel;
namespace parallel {
class MeshParallelism;
}
}  // namespace lockstep

namespace lockstep::train {

class ThreadedExecution : public Execution {
 public:
  explicit ThreadedExecution(ModelImpl& impl);

  std::vector<PerReplica<StepResult>> train(std::vector<Parts>& batches, Tracker& tracker,
                                            std::unique_ptr<Prepared> prepared,
                                            const std::function<void()>& meanwhile) override;
  PerReplica<StepResult> evaluate(Parts& batch, Tracker& tracker) override;
  std::vector<Tensor> predict(Parts& batch) override;
  void forget_steps() override { recorded_ = {}; }

 protected:
  // Computes a replica's forward, loss and backward. Metrics get ComputedStep::outputs, unless they are undefined.
  virtual ComputedStep compute_gradients(ReplicaContext& replica, const Example& part, Tracker& tracker,
                                         StepTimes& spent);

  // Does backward from loss_of(outputs, first example, count) of all of `part`, with gradients of zero.
  using LossOf = std::function<Tensor(const Tensor& output, std::int64_t first, std::int64_t count)>;
  virtual void compute_zeros(int replica, const Example& part, const LossOf& loss_of);

  virtual AddedLosses::Use losses_in_evaluation() const { return AddedLosses::Use::values_alone; }

  double weight_of(const ReplicaContext& replica, double divisor) const;

 private:
  StepResult train_step(ReplicaContext& replica, const internal::Part& unread, Tracker& tracker);
  ComputedStep compute_no_gradients(ReplicaContext& replica, const Example& empty);
  Tensor outputs_of_any(int replica, const Example& part) const;
  Example example_of_none(const Example& empty) const;
  Example own_positions(const Example& part) const;
  std::unique_ptr<ContextParallel> use_context() const;

  // Enqueues the part of a step that jit_compile can record; and makes a step by replaying the recording.
  ComputedStep enqueue_step(ReplicaContext& replica, const Example& batch);
  StepResult play_step(ReplicaContext& replica, const Example& part, Tracker& tracker);

  const parallel::MeshParallelism* const mesh_;  // over which the strategy splits models; null: none
  RecordedStep recorded_;
  bool warned_of_context_ = false;
  mutable Example example_;  // of zeros, for a step in which this worker has no examples
};

// Returns rows `first` to `first` + `count` of a part.
Example rows_of(const Example& part, std::int64_t first, std::int64_t count);

}  // namespace lockstep::train
