#include "lockstep/strategy/variable.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "base/text.h"
#include "data/stored_tensor.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "strategy/strategy_impl.h"

namespace lockstep {

class VariableImpl {
 public:
  VariableImpl(const Tensor& initial, VariableOptions variable_options, const Strategy& strategy)
      : options(variable_options),
        sizes(initial.sizes().vec()),
        dtype(initial.scalar_type()),
        devices(unwrap(strategy).replicas().devices()),
        workers(unwrap(strategy).topology().data) {
    const auto shared = initial.detach().clone();
    broadcast(unwrap(strategy).topology().all, {shared});
    for (const auto& device : devices) copies.push_back(at::empty_like(shared, device));
    set_all(shared);
    in_programs = unwrap(strategy).kind().variable(copies);
  }

  // Set and get the replica's value, in its step.
  void set(const ReplicaContext& replica, const Tensor& value) {
    if (auto* const trace = ops::current_trace())
      in_trace(*trace).copy_(value);
    else
      copy(replica) = value;
  }
  Tensor get(const ReplicaContext& replica) {
    if (auto* const trace = ops::current_trace()) return in_trace(*trace).clone();
    return copy(replica);
  }

  Tensor in_trace(ops::StepTrace& trace) const {
    if (!in_programs) {
      throw InvalidArgument(
          "a variable of another strategy is used in a step that is compiled; make it in the scope of the strategy "
          "that "
          "runs the step");
    }
    return trace.value_of((*in_programs)[0]);
  }

  Tensor& copy(const ReplicaContext& replica) {
    const int all = static_cast<int>(copies.size()) * workers.size();
    if (all != replica.num_replicas_in_sync()) {
      throw InvalidArgument(text("a variable made for ", all, " replicas is used on ", replica.num_replicas_in_sync(),
                                 "; make it in the scope of the strategy that runs the step"));
    }
    return copies[static_cast<std::size_t>(replica.local_replica_id())];
  }

  // Throws for another shape or dtype. Any thread: other replicas may be writing their copies.
  void check_shape(const Tensor& value) const {
    if (value.sizes() != sizes) {
      throw InvalidArgument(
          text("a value of shape ", value.sizes(), " is assigned to a variable of shape ", at::IntArrayRef(sizes)));
    }
    if (value.scalar_type() != dtype) {
      throw InvalidArgument(
          text("a value of dtype ", value.scalar_type(), " is assigned to a variable of dtype ", dtype));
    }
  }

  // Aggregates the values that all replicas pass.
  Tensor aggregate(const ReplicaContext& replica, const Tensor& value) const {
    switch (options.aggregation) {
      case VariableAggregation::sum: return replica.all_reduce(ReduceOp::sum, value);
      case VariableAggregation::mean: return replica.all_reduce(ReduceOp::mean, value);
      case VariableAggregation::only_first_replica: return replica.all_gather(value.unsqueeze(0)).select(0, 0).clone();
      case VariableAggregation::none: break;
    }
    throw InvalidArgument(
        "a variable without aggregation is assigned in a step; make it with sum, mean or only_first_replica");
  }

  void set_all(const Tensor& value) {
    const bool summed =
        options.synchronization == VariableSynchronization::on_read && options.aggregation == VariableAggregation::sum;
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const bool first = i == 0 && workers.rank() == 0;
      const auto copy = summed && !first ? at::zeros_like(value) : value.detach();
      if (in_programs)
        copies[i].copy_(copy);  // the devices' variables are known by these tensors
      else
        copies[i] = copy.to(devices[i], dtype, /*non_blocking=*/false, /*copy=*/true);
    }
  }

  Tensor read() const {
    if (in_programs) in_programs->fetch(workers.deadline());
    if (options.synchronization == VariableSynchronization::on_write) return copies[0].clone();
    Tensor result = copies[0].clone();
    const auto all = copies.size() * static_cast<std::size_t>(workers.size());
    switch (options.aggregation) {
      case VariableAggregation::only_first_replica: broadcast(workers, {result}); return result;
      case VariableAggregation::none: {
        if (all == 1) return result;
        throw InvalidArgument(
            "a variable that is synchronized on read has no aggregation; make it with sum, mean or only_first_replica");
      }
      default: break;
    }
    for (std::size_t i = 1; i < copies.size(); ++i) result += copies[i].to(result.device());
    if (workers.size() > 1) all_reduce(workers.group(), result, ReduceOp::sum, workers.deadline());
    return options.aggregation == VariableAggregation::mean ? result / static_cast<double>(all) : result;
  }

  const VariableOptions options;
  const std::vector<std::int64_t> sizes;
  const at::ScalarType dtype;
  const std::vector<c10::Device> devices;  // [replica]
  const Communicator workers;
  std::vector<Tensor> copies;  // [replica], written by that replica in steps
  std::unique_ptr<ops::DeviceVariables>
      in_programs;  // null unless steps are compiled: one variable, whose host's tensors are `copies`
};

Variable::Variable(const Tensor& initial, VariableOptions options, const Strategy& strategy)
    : impl_(std::make_shared<VariableImpl>(initial, options, strategy)) {}

void Variable::assign(const ReplicaContext& replica, const Tensor& value) const {
  impl_->check_shape(value);
  const bool collective = impl_->options.synchronization == VariableSynchronization::on_write;
  impl_->set(replica, collective ? impl_->aggregate(replica, value) : value.detach().clone());
}

void Variable::assign_add(const ReplicaContext& replica, const Tensor& value) const {
  impl_->check_shape(value);
  const bool collective = impl_->options.synchronization == VariableSynchronization::on_write;
  impl_->set(replica, impl_->get(replica) + (collective ? impl_->aggregate(replica, value) : value.detach()));
}

Tensor Variable::value(const ReplicaContext& replica) const { return impl_->get(replica); }

void Variable::assign(const Tensor& value) const {
  impl_->check_shape(value);
  impl_->set_all(value);
}

Tensor Variable::read() const { return impl_->read(); }

Trackable Variable::trackable() const {
  return {[impl = impl_](Archive& archive, const std::string& prefix) {
            archive.tensors[prefix] = data::to_stored(impl->read());
          },
          [impl = impl_](const Archive& archive, const std::string& prefix) -> std::function<void()> {
            const auto value = data::from_stored(archive.tensor(prefix));
            impl->check_shape(value);
            return [impl, value] { impl->set_all(value); };
          },
          impl_->workers};
}

}  // namespace lockstep
