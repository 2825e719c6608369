// Steps that the threads of this process's replicas compute.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/data/dataset.h"
#include "ops/traced_program.h"
#include "train/added_losses.h"
#include "train/execution.h"

namespace lockstep::train {

// The results of forward and backward on one replica's part, besides gradients.
struct ComputedStep {
  Tensor outputs, loss_sum;
  double divisor = 0;  // divisor of the loss
  double weight = 0;   // weight of the gradients, for the update
};

// A training step on a GPU that is recorded and replayed: compile({.jit_compile = true}). One thread at a time.
class RecordedStep {
 public:
  // Returns true where a step on `device` is recorded for batches like this one, which may lie elsewhere. Records it
  // after three batches of the same shapes: `compute` enqueues the whole step, update included. Where recording fails,
  // a warning says why, nothing has changed, and nothing is recorded from then on.
  bool serves(const Example& part, c10::Device device, const std::function<ComputedStep(const Example&)>& compute);

  // Replays the recorded step for `part`.
  ComputedStep play(const Example& part);

  const Example& input() const { return input_; }  // the last play's part, on the device

 private:
  void record(const Example& part, c10::Device device, const std::function<ComputedStep(const Example&)>& compute);
  void give_up(const char* reason);

  static constexpr int kStepsBefore = 3;  // warm-up: LibTorch chooses algorithms and allocates memory

  std::vector<std::int64_t> shape_;  // of the batches that came last
  int seen_ = 0;                     // batches of that shape
  bool failed_ = false;
  Example input_;        // the recorded step reads it
  ComputedStep result_;  // the recorded step writes it
  std::unique_ptr<ops::RecordedWork> work_;
};

class ThreadedExecution : public Execution {
 public:
  using Execution::Execution;

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

  // Throws InvalidArgument for a loss that these steps cannot have.
  virtual void check_loss() const {}

  // Returns the outputs for a part that may be empty.
  virtual Tensor outputs_of_any(int replica, const Example& part) const;

  // Return the part of an example that this process computes with, and the whole of what it computed.
  virtual Example own_part(const Example& part) const { return part; }
  virtual Tensor whole(const Tensor& outputs) const { return outputs; }

  // True where a replica without examples computes with no tokens, since other processes' tokens come to its layers.
  virtual bool computes_with_no_tokens() const { return false; }

  virtual AddedLosses::Use losses_in_evaluation() const { return AddedLosses::Use::values_alone; }

  double weight_of(const ReplicaContext& replica, double divisor) const;

 private:
  StepResult train_step(ReplicaContext& replica, const internal::Part& unread, Tracker& tracker);
  ComputedStep compute_no_gradients(ReplicaContext& replica, const Example& empty);
  Example example_of_none(const Example& empty) const;

  // Enqueues the part of a step that jit_compile can record; and makes a step by replaying the recording.
  ComputedStep enqueue_step(ReplicaContext& replica, const Example& batch);
  StepResult play_step(ReplicaContext& replica, const Example& part, Tracker& tracker);

  RecordedStep recorded_;
  mutable Example example_;  // of zeros, for a step in which this worker has no examples
};

}  // namespace lockstep::train
