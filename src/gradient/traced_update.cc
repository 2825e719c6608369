#include "gradient/traced_update.h"

#include <ATen/ATen.h>

#include "lockstep/base/error.h"

namespace lockstep::gradient {
namespace {

// Gives `tensor` its old value where `keeps` is false: a step without weight changes nothing.
void keep_unless(const at::Tensor& updates, const at::Tensor& tensor, const at::Tensor& old) {
  tensor.copy_(at::where(updates, tensor, old));
}

}  // namespace

TracedUpdate::TracedUpdate(ReplicatedParameters& parameters, Updater& updater, ops::ProgramDevices& devices)
    : parameters_(parameters), updater_(updater) {
  if (updater.loss_scale().used()) {
    throw InvalidArgument(
        "a LossScaleOptimizer is for float16; a TPU computes in bfloat16, whose gradients need no scale: use the "
        "optimizer by itself");
  }
  const auto count = updater.optimizer().rule().states().size();
  std::vector<ops::ProgramDevices::Tensors> hosts;
  for (std::size_t slot = 0; slot < parameters.slots().size(); ++slot) {
    first_state_.push_back(hosts.size());
    for (std::size_t k = 0; parameters.slots()[slot].trainable && k < count; ++k)
      hosts.push_back({updater.state(slot, k)});
  }
  states_ = devices.variables(std::move(hosts));
}

void TracedUpdate::apply(ops::StepTrace& trace, const at::Tensor& total_weight) {
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kFloat, at::kDouble}) apply(trace, total_weight, dtype);
  trace.after_update([this] { updater_.count_step(); });
}

void TracedUpdate::apply(ops::StepTrace& trace, const at::Tensor& total_weight, at::ScalarType dtype) {
  DeviceParameters all;
  all.states.resize(updater_.optimizer().rule().states().size());
  std::vector<at::Tensor> gradients;
  for (std::size_t slot = 0; slot < first_state_.size(); ++slot) {
    const auto& info = parameters_.slots()[slot];
    if (!info.trainable || info.dtype != dtype) continue;
    const auto value = trace.value_of(parameters_.variable(slot));
    if (!value.grad().defined()) continue;
    gradients.push_back(value.grad());
    all.values.push_back(value.detach());
    for (std::size_t k = 0; k < all.states.size(); ++k) 
      all.states[k].push_back(trace.value_of((*states_)[first_state_[slot] + k]));
  }
  if (all.values.empty()) return;

  const auto divide_by = total_weight.to(dtype);
  for (const auto& gradient : gradients)
    all.gradients.push_back(trace.all_reduce(ReduceOp::sum, gradient) / divide_by);
  const DeviceUpdate update(updater_.optimizer(), all.values[0].options());
  std::vector<at::Tensor> numbers;
  for (std::size_t i = 0; i < update.numbers(updater_.step_after(0)).size(); ++i) {
    numbers.push_back(trace.number(dtype, [this, rule = std::make_shared<DeviceUpdate>(
                                                     updater_.optimizer(), at::TensorOptions(dtype)), i](auto ahead) {
      return rule->numbers(updater_.step_after(ahead))[i];
    }));
  }
  std::vector<at::Tensor> changed = all.values, old;
  for (const auto& states : all.states) changed.insert(changed.end(), states.begin(), states.end());
  for (const auto& tensor : changed) old.push_back(tensor.clone());
  update.apply(all, 1, numbers);
  const auto updates = total_weight > 0;
  for (std::size_t i = 0; i < changed.size(); ++i) keep_unless(updates, changed[i], old[i]);
}

void TracedUpdate::fetch(Deadline deadline) const {
  states_->fetch(deadline);
}

}  // namespace lockstep::gradient
