// How the steps of a model's batches are computed: by this process's replicas, or by programs on devices.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/strategy/strategy.h"
#include "strategy/split.h"
#include "train/tracker.h"

namespace lockstep {
class ModelImpl;
}

namespace lockstep::train {

// The execution of one model's steps, with its optimizer; one thread. Steps are collective over the strategy's workers.
class Execution {
 public:
  // Makes the execution that the model's strategy needs. `impl` must outlive it.
  static std::shared_ptr<Execution> of(ModelImpl& impl);
  explicit Execution(ModelImpl& impl) : impl_(impl) {}
  virtual ~Execution() = default;
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  // Makes the model's parameters for batches like `sample`, with first values. Collective. Called once, before all
  // else.
  virtual std::shared_ptr<ReplicatedParameters> make_parameters(const Example& sample);

  using Parts = PerReplica<internal::Part>;  // a batch's

  // Batches on their way to the devices that compute their steps.
  struct Prepared {
    virtual ~Prepared() = default;
  };

  // True where the next step's batches are read, and prepared, while devices compute this one.
  virtual bool reads_ahead() const { return false; }
  virtual std::unique_ptr<Prepared> prepare(std::vector<Parts>& /*batches*/) { return nullptr; }

  // Makes a step for each batch, at most CompileOptions::steps_per_execution; each result is for Tracker::add_batch.
  // `prepared`: the result of `prepare` for these, or null. Calls `meanwhile` while devices compute.
  virtual std::vector<PerReplica<StepResult>> train(std::vector<Parts>& batches, Tracker& tracker,
                                                    std::unique_ptr<Prepared> prepared = {},
                                                    const std::function<void()>& meanwhile = {}) = 0;

  virtual PerReplica<StepResult> evaluate(Parts& batch, Tracker& tracker) = 0;

  // Returns the outputs for each replica's examples; undefined where it has none.
  virtual std::vector<Tensor> predict(Parts& batch) = 0;

  // Brings the values here that evaluate and predict need.
  virtual void fetch_for_forward() const;

  // Call it after the optimizer, or the parameters that are trained, changed: a step that is replayed, or compiled, is
  // made anew.
  virtual void forget_steps() {}

 protected:
  // Computes a replica's forward. Throws InvalidArgument naming the batch where LibTorch refuses it.
  Tensor outputs_of(int replica, const Example& part) const;
  virtual Tensor forward(int replica, const Tensor& x) const;

  // Throws InvalidArgument where a loss has no gradient.
  static void require_gradient(const Tensor& loss);

  ModelImpl& impl_;
};

// Returns "a batch of shape [4, 3] and dtype float", for messages.
std::string batch_named(const Example& part);

}  // namespace lockstep::train
