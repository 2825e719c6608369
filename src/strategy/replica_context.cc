// The calls of step functions: exchange of tensors between replicas, and their random numbers.
#include "lockstep/gradient/tensor_collectives.h"
#include "strategy/strategy_impl.h"

namespace lockstep {

int ReplicaContext::replica_id() const { return strategy_.topology().first_replica() + local_replica_id(); }

int ReplicaContext::local_replica_id() const {
  if (ops::current_trace() == nullptr) return local_replica_id_;
  throw InvalidArgument(
      "replica_id: a step that is compiled is one program for all replicas; give each its own data instead");
}

int ReplicaContext::num_replicas_in_sync() const { return strategy_.topology().all_replicas(); }
const Group& ReplicaContext::group() const { return strategy_.replicas().group(local_replica_id_); }
const Group& ReplicaContext::local_group() const { return strategy_.replicas().local_group(local_replica_id_); }
Deadline ReplicaContext::deadline() const { return strategy_.deadline(); }

const std::string& ReplicaContext::device() const {
  return strategy_.settings().devices[static_cast<std::size_t>(local_replica_id_)];
}

void ReplicaContext::seed_random(std::uint64_t seed) const {
  if (ops::current_trace() != nullptr)
    throw InvalidArgument("seed_random: a step that is compiled has random numbers of its own in each run");
  strategy_.replicas().random(local_replica_id_).seed(seed);
}

Tensor ReplicaContext::all_reduce(ReduceOp op, const Tensor& value) const {
  if (auto* const trace = ops::current_trace()) return trace->all_reduce(op, {value})[0];
  const auto result = value.detach().clone(at::MemoryFormat::Contiguous);
  lockstep::all_reduce(group(), result, op, deadline());
  return result;
}

Tensor ReplicaContext::all_gather(const Tensor& value, std::int64_t axis) const {
  if (auto* const trace = ops::current_trace()) return trace->all_gather(value, axis);
  return lockstep::all_gather(group(), value, deadline(), axis);
}

}  // namespace lockstep
