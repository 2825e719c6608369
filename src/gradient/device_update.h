// Updates of parameters on the GPU that holds them, by a few of LibTorch's kernels for all parameters together, or on a
// TPU. The host waits for none of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "gradient/replicated_parameters.h"
#include "lockstep/gradient/device_rule.h"
#include "ops/traced_program.h"

namespace lockstep::gradient {

class Updater;

// The rule and the settings of one optimizer, for one device and dtype. One thread at a time.
class DeviceUpdate {
 public:
  DeviceUpdate(const Optimizer& optimizer, const at::TensorOptions& options);

  // The numbers that change from step to step: what weight decay, if any, multiplies values by, then the rule's.
  std::vector<double> numbers(const UpdateStep& step) const;

  // The gradients divided by divide_by, then clipped by value where the optimizer does so.
  std::vector<at::Tensor> scaled(const std::vector<at::Tensor>& gradients, double divide_by) const;

  // Updates the values with the gradients as they are. `numbers`: scalars on the device.
  void apply(const DeviceParameters& parameters, const std::vector<at::Tensor>& numbers) const;

 private:
  double decay() const { return optimizer_.options().weight_decay.value_or(0); }

  Optimizer optimizer_;
  std::unique_ptr<DeviceRule> rule_;
};

// Returns what an optimizer that clips by norms multiplies gradients by: bound / max(norm, bound). `norms`, and the
// result: 1-D, of the whole gradients of a model's parameters.
at::Tensor clip_factors(const Optimizer& optimizer, const at::Tensor& norms);

// The update of a step that is traced for devices that run compiled programs, which have the optimizer's state as well.
// One thread at a time.
class TracedUpdate {
 public:
  // The state of `updater` becomes variables of the devices. Both live longer. Throws InvalidArgument for a loss scale,
  // which these devices' dtypes do not need.
  TracedUpdate(ReplicatedParameters& parameters, Updater& updater, ops::ProgramDevices& devices);

  // Updates with the gradients that backward has left in the traced step, as GradientPath::apply. `weight` of this
  // replica's gradients: a scalar, 0 where it has no examples. `divides`: the sum of gradients is divided by the sum of
  // all replicas' weights, which else only says whether there are examples.
  void apply(ops::StepTrace& trace, const at::Tensor& weight, bool divides);

  // Brings the state's values from the devices.
  void fetch(Deadline deadline) const;

 private:
  void update(ops::StepTrace& trace, const at::Tensor& total_weight, bool divides, at::ScalarType dtype,
              const std::map<std::size_t, at::Tensor>& sums, std::int64_t number) const;

  ReplicatedParameters& parameters_;
  Updater& updater_;
  const std::shared_ptr<Updater*> alive_ = std::make_shared<Updater*>(&updater_);  // programs may live longer
  std::vector<std::size_t> first_state_;                                           // [slot]: its place in states_
  std::unique_ptr<ops::DeviceVariables> states_;  // of trainable slots, one after the other
};

}  // namespace lockstep::gradient
