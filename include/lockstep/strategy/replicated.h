// A module that every replica has a copy of, and the state of an optimizer for it: what a custom loop trains.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/optimizer/optimizer.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

class ReplicaContext;
class ReplicatedParameters;
class GradientPath;

namespace internal {
struct Unwrap;  // the library's own
}

// A shared handle. A replica's step touches its own copy only; everything here is for the thread that calls
// Strategy::run, between runs.
class ReplicatedModule {
 public:
  explicit ReplicatedModule(std::shared_ptr<ReplicatedParameters> impl) : impl_(std::move(impl)) {}

  // Named by the module's parameter and buffer names; what tied parameters share is stored under their first name.
  // Buffers (BatchNorm's running statistics) are each replica's own in training; stored is their mean over the
  // replicas.
  Trackable trackable() const;

  // The replicas' own buffers, with which training goes on bit for bit. Loading needs as many replicas as saved them,
  // and changes nothing otherwise.
  Trackable replica_buffers() const;

  // With TPUStrategy: brings the devices' values to the host. Else it does nothing.
  void fetch() const;

  void train(bool on = true) const;
  void eval() const { train(false); }

 private:
  friend struct internal::Unwrap;
  std::shared_ptr<ReplicatedParameters> impl_;
};

// The copies as the type that the factory returned: a module holder (Net) or a shared_ptr. Equal bit for bit, like
// tf.distribute's Mirrored; element i is replica i's.
template <class Holder>
class Mirrored : public ReplicatedModule {
 public:
  Mirrored(std::shared_ptr<ReplicatedParameters> parameters, std::vector<Holder> replicas)
      : ReplicatedModule(std::move(parameters)), replicas_(std::move(replicas)) {}

  int size() const { return static_cast<int>(replicas_.size()); }

  // With TPUStrategy its parameters have the devices' values as they are now. Between runs.
  Holder& operator[](int replica) {
    fetch();
    return of_replica(replica);
  }

  // Returns a replica's copy in a step, without bringing values.
  Holder& of_replica(int replica) { return replicas_[static_cast<std::size_t>(replica)]; }

 private:
  std::vector<Holder> replicas_;
};

// A shared handle. minimize and apply_gradients are for step functions, on all replicas at once; the rest is for the
// thread that calls Strategy::run, between runs.
class ReplicatedOptimizer {
 public:
  explicit ReplicatedOptimizer(std::shared_ptr<GradientPath> impl, Trackable::Files files = {})
      : impl_(std::move(impl)), files_(std::move(files)) {}

  // Collective. Backward from `loss`, a scalar: the sum over this replica's examples, scaled where the optimizer is a
  // LossScaleOptimizer. Then apply_gradients. Throws InvalidArgument for a loss that is no scalar with a gradient.
  void minimize(const ReplicaContext& replica, const Tensor& loss, double weight) const;

  // Collective. Updates with (sum of all replicas' gradients) / (sum of their weights). With a loss summed over
  // examples, and their number as `weight`, N replicas make the update of the whole batch. A replica without examples
  // calls it with weight 0. Throws with all variables as they were when any replica failed before, and InvalidArgument
  // for a weight below 0.
  void apply_gradients(const ReplicaContext& replica, double weight) const;

  // The loss with which backward must begin before apply_gradients where the optimizer is a LossScaleOptimizer; else
  // `loss`.
  Tensor scale_loss(const Tensor& loss) const;

  // With `diloco`: a meeting now, after which the workers' variables are equal. Does nothing for other strategies.
  // Collective over the workers.
  void meet() const;

  std::int64_t iterations() const;            // updates so far
  std::int64_t state_bytes() const;           // memory of the optimizer's state in this process, or on its first GPU
  double learning_rate() const;               // of the next update
  double loss_scale() const;                  // of the next update; 1 without a LossScaleOptimizer
  void set_learning_rate(double rate) const;  // from now on, in place of the optimizer's own

  // The optimizer's state. With parameter servers also their variables, and rows of tables, in files of their own: the
  // chief saves and restores these, while no step is scheduled.
  Trackable trackable() const;

 private:
  friend struct internal::Unwrap;
  std::shared_ptr<GradientPath> impl_;
  Trackable::Files files_;
};

}  // namespace lockstep
