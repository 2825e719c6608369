#include "gradient/traced_update.h"

#include <ATen/ATen.h>

#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::gradient {
namespace {

// Gives `tensor` its old value where `updates` is false: a step without weight changes nothing.
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

void TracedUpdate::apply(ops::StepTrace& trace, const TracedWeight& weight) {
  const at::NoGradGuard no_grad;
  std::vector<std::size_t> slots;
  std::vector<at::Tensor> gradients{weight.weight};
  for (std::size_t slot = 0; slot < first_state_.size(); ++slot) {
    if (!parameters_.slots()[slot].trainable) continue;
    auto& host = parameters_.parameter(0, slot);
    const auto gradient = std::exchange(host.mutable_grad(), {});
    if (!gradient.defined()) continue;
    trace.value_of(parameters_.variable(slot)).mutable_grad().reset();  // another backward begins anew
    slots.push_back(slot);
    gradients.push_back(gradient);
  }
  const auto sums = trace.all_reduce(ReduceOp::sum, gradients);
  std::map<std::size_t, at::Tensor> by_slot;
  for (std::size_t i = 0; i < slots.size(); ++i) by_slot[slots[i]] = sums[i + 1];
  const auto number = trace.number_of_update(this);
  for (const auto dtype : {at::kFloat, at::kDouble}) update(trace, sums[0], weight.divides, dtype, by_slot, number);
  trace.after_update([alive = std::weak_ptr(alive_)] {
    if (const auto updater = alive.lock()) (*updater)->count_step();
  });
}

void TracedUpdate::update(ops::StepTrace& trace, const at::Tensor& total_weight, bool divides, at::ScalarType dtype,
                          const std::map<std::size_t, at::Tensor>& sums, std::int64_t number) const {
  DeviceParameters all;
  all.states.resize(updater_.optimizer().rule().states().size());
  for (const auto& [slot, sum] : sums) {
    if (parameters_.slots()[slot].dtype != dtype) continue;
    all.gradients.push_back(divides ? sum / total_weight.to(dtype) : sum);
    all.values.push_back(trace.value_of(parameters_.variable(slot)).detach());
    for (std::size_t k = 0; k < all.states.size(); ++k)
      all.states[k].push_back(trace.value_of((*states_)[first_state_[slot] + k]));
  }
  if (all.values.empty()) return;

  const DeviceUpdate rule(updater_.optimizer(), all.values[0].options());
  std::vector<at::Tensor> numbers;
  for (std::size_t i = 0; i < rule.numbers(updater_.step_after(0)).size(); ++i) {
    numbers.push_back(trace.number(
        dtype, [alive = std::weak_ptr(alive_), number, i,
                of_host = std::make_shared<DeviceUpdate>(updater_.optimizer(), at::TensorOptions(dtype))](auto ahead) {
          const auto updater = alive.lock();
          if (!updater) throw InvalidArgument("a compiled step runs whose optimizer is gone");
          return of_host->numbers((*updater)->step_after(ahead + number))[i];
        }));
  }
  std::vector<at::Tensor> changed = all.values, old;
  for (const auto& states : all.states) changed.insert(changed.end(), states.begin(), states.end());
  for (const auto& tensor : changed) old.push_back(tensor.clone());
  rule.apply(all, 1, numbers);
  const auto updates = total_weight > 0;
  for (std::size_t i = 0; i < changed.size(); ++i) keep_unless(updates, changed[i], old[i]);
}

void TracedUpdate::fetch(Deadline deadline) const { states_->fetch(deadline); }

}  // namespace lockstep::gradient
