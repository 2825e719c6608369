// How a rule of your own updates variables on a GPU or a TPU. Without it the rule runs on spans in host memory, to
// which a GPU's values, gradients and state are copied in every step; a TPU's cannot be.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <typeindex>
#include <vector>

#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

// Parameters of one dtype and device. All lists have one length, but for `states`: [state][parameter], as
// UpdateRule::states().
struct DeviceParameters {
  std::vector<at::Tensor> values, gradients;
  std::vector<std::vector<at::Tensor>> states;
};

// One optimizer's rule on one device, for one dtype. One thread at a time.
class DeviceRule {
 public:
  virtual ~DeviceRule() = default;

  // The numbers that change from step to step, such as the learning rate: as many in every step.
  virtual std::vector<double> numbers(const UpdateStep& step) const = 0;

  // Updates all parameters, as UpdateRule::update: writes values and states in place; gradients are the mean, clipped.
  // `numbers`: those of the step, each as a scalar on the device. Called once for a CUDA graph (jit_compile) or a
  // compiled step, which then run with other numbers: it must not read a tensor's values.
  virtual void update(const DeviceParameters& parameters, const std::vector<at::Tensor>& numbers) = 0;
};

// Makes the device rule of `rule` for the device and dtype in `options`. `rule` outlives it.
using MakeDeviceRule =
    std::function<std::unique_ptr<DeviceRule>(const UpdateRule& rule, const at::TensorOptions& options)>;

// Optimizers that are made from now on with a rule of exactly this type use what `make` returns for it. Any thread.
void register_device_rule(std::type_index rule, MakeDeviceRule make);

// register_device_rule<MyRule>([](const MyRule& rule, const at::TensorOptions& options) { return ...; });
template <class Rule, class Make>
void register_device_rule(const Make& make) {
  register_device_rule(typeid(Rule), [make](const UpdateRule& rule, const at::TensorOptions& options) {
    return make(static_cast<const Rule&>(rule), options);
  });
}

}  // namespace lockstep
