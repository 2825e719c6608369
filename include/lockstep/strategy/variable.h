// Variable: a tensor with a copy on each replica, for the state of custom loops. Follows tf.Variable under a strategy.
#pragma once

#include <memory>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/strategy/strategy.h"

namespace lockstep {

// When the copies are brought together.
enum class VariableSynchronization {
  on_write,  // each assignment is collective; the copies stay equal
  on_read,   // assignments are a replica's own; reading outside of a step aggregates
};

// How values of several replicas become one.
enum class VariableAggregation {
  none,  // assigning in a step, or reading copies that may differ, is an error
  sum,
  mean,
  only_first_replica,
};

struct VariableOptions {
  VariableSynchronization synchronization = VariableSynchronization::on_write;
  VariableAggregation aggregation = VariableAggregation::none;
};

class VariableImpl;

// A shared handle. In a step, each replica's thread uses its own copy; outside, one thread at a time.
class Variable {
 public:
  // Every copy begins as `initial`. Made for the strategy in scope unless one is given.
  explicit Variable(const Tensor& initial, VariableOptions options = {},
                    const Strategy& strategy = Strategy::current());

  // In a step. on_write: collective; every copy becomes (or grows by) the aggregate of the replicas' values. on_read:
  // this replica's copy alone. Throws InvalidArgument for on_write without an aggregation, and for another shape.
  void assign(const ReplicaContext& replica, const Tensor& value) const;
  void assign_add(const ReplicaContext& replica, const Tensor& value) const;

  // In a step: this replica's copy.
  Tensor value(const ReplicaContext& replica) const;

  // Outside of steps: assigns every copy. With on_read and sum, the first copy gets the value and the others zeros, so
  // that what is read is what was assigned.
  void assign(const Tensor& value) const;

  // Outside of steps: a new tensor. on_read aggregates the copies; throws InvalidArgument when there is no aggregation.
  Tensor read() const;

  Trackable trackable() const;

 private:
  std::shared_ptr<VariableImpl> impl_;
};

}  // namespace lockstep
