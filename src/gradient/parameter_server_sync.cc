#include "gradient/parameter_server_sync.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "ops/dtypes.h"
#include "optimizer/flat_update.h"

namespace lockstep::gradient {

std::vector<parameter_server::VariableSpec> variables_of(const ReplicatedParameters& parameters) {
  std::vector<parameter_server::VariableSpec> variables;
  for (const auto& slot : parameters.slots()) {
    if (slot.trainable) variables.push_back({slot.name, ops::dtype_of(slot.dtype), slot.sizes});
  }
  return variables;
}

ParameterServerSync::ParameterServerSync(ReplicatedParameters& parameters,
                                         std::shared_ptr<parameter_server::Client> client)
    : OnePass(parameters),
      client_(std::move(client)),
      shares_(ShardMap::even(parameters.trainable(), parameters.replicas())) {}

// Copy 0's values of them.
std::vector<std::byte*> ParameterServerSync::variables() const {
  std::vector<std::byte*> values;
  for (const auto& variable : shares_.owned()) {
    const auto& slot = parameters_.slots()[variable.slot];
    const auto first = parameters_.flat(0, slot.dtype).narrow(0, slot.offset, slot.numel);
    values.push_back(static_cast<std::byte*>(first.mutable_data_ptr()));
  }
  return values;
}

void ParameterServerSync::store(Deadline deadline) {
  const auto values = variables();
  client_->write(std::vector<const std::byte*>(values.begin(), values.end()), deadline);
}

void ParameterServerSync::fetch(Deadline deadline) {
  client_->pull(variables(), deadline);
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const auto& copy : parameters_.flats(dtype).subspan(1)) copy.copy_(parameters_.flat(0, dtype));
  }
}

void ParameterServerSync::wait(const Group& replicas, Deadline deadline) {
  const int replica = replicas.rank();
  if (parameters_.replicas() > 1) {
    if (replica == 0) {
      float_ = at::empty({parameters_.flat_numel(at::kFloat)}, at::kFloat);
      double_ = at::empty({parameters_.flat_numel(at::kDouble)}, at::kDouble);
    }
    replicas.barrier(deadline);
    add_up(replica);
    replicas.barrier(deadline);
  }
  if (replica == 0) push(deadline);
  replicas.barrier(deadline);
}

void ParameterServerSync::add_up(int replica) {
  for (const auto& shard : shares_.of(replica)) {
    const auto gradients = sources(shard.slot);
    const auto& slot = parameters_.slots()[shard.slot];
    const auto add = [&]<class T>(T, const at::Tensor& sums) {
      std::vector<const T*> begins;
      for (const auto* gradient : gradients) begins.push_back(gradient->const_data_ptr<T>() + shard.begin);
      auto* const sum = sums.mutable_data_ptr<T>() + slot.offset + shard.begin;
      optimizer::sum_gradients<T>(begins, {}, sum, static_cast<std::size_t>(shard.count));
    };
    if (gradients.empty()) continue;
    if (slot.dtype == at::kDouble) {
      add(double(), double_);
    } else {
      add(float(), float_);
    }
  }
}

void ParameterServerSync::push(Deadline deadline) {
  const auto memory = std::make_shared<std::vector<at::Tensor>>();  // a server may read it after this step
  std::vector<const std::byte*> gradients;
  for (const auto& variable : shares_.owned()) {
    const auto& slot = parameters_.slots()[variable.slot];
    const auto own = sources(variable.slot);
    if (own.empty()) {
      gradients.push_back(nullptr);
      continue;
    }
    const auto& sums = slot.dtype == at::kDouble ? double_ : float_;
    memory->push_back(own.size() == 1 ? *own[0] : sums.narrow(0, slot.offset, slot.numel));
    gradients.push_back(static_cast<const std::byte*>(memory->back().const_data_ptr()));
  }
  client_->push({.weight = totals().weight, .memory = memory}, gradients, deadline);
}

}  // namespace lockstep::gradient
