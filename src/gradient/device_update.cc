#include "gradient/device_update.h"

#include <ATen/ATen.h>

#include "optimizer/rules.h"

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;

void update(const SGDOptions& options, const DeviceParameters& p, const at::Tensor& rate) {
  const auto step = at::_foreach_mul(p.gradients, rate);
  if (options.momentum == 0) {
    at::_foreach_sub_(p.values, step);
    return;
  }
  const auto& velocity = p.states[0];
  at::_foreach_mul_(velocity, options.momentum);
  at::_foreach_sub_(velocity, step);
  if (options.nesterov) {
    at::_foreach_add_(p.values, velocity, options.momentum);
    at::_foreach_sub_(p.values, step);
  } else {
    at::_foreach_add_(p.values, velocity);
  }
}

// LibTorch adds epsilon after the correction, Keras before: `rate` has the correction, and `far_step` leaves none to
// LibTorch.
void update(const AdamOptions& options, const DeviceParameters& p, const at::Tensor& rate, const at::Tensor& far_step) {
  const Tensors steps(p.values.size(), far_step);
  const auto fused = [&](const auto& learning_rate) {
    at::_fused_adam_(p.values, p.gradients, p.states[0], p.states[1], options.amsgrad ? p.states[2] : Tensors(), steps,
                     learning_rate, options.beta_1, options.beta_2, /*weight_decay=*/0, options.epsilon,
                     options.amsgrad, /*maximize=*/false);
  };
  if (rate.scalar_type() == at::kFloat) return fused(rate);
  fused(rate.item<double>());  // its kernel takes no double from the device
}

void update(const RMSpropOptions& options, const DeviceParameters& p, const at::Tensor& rate) {
  const auto& square = p.states[0];
  at::_foreach_mul_(square, options.rho);
  at::_foreach_addcmul_(square, p.gradients, p.gradients, 1 - options.rho);
  auto denominator = at::_foreach_add(square, options.epsilon);
  if (options.centered) {
    const auto& mean = p.states[1];
    at::_foreach_mul_(mean, options.rho);
    at::_foreach_add_(mean, p.gradients, 1 - options.rho);
    at::_foreach_addcmul_(denominator, mean, mean, -1);
  }
  at::_foreach_sqrt_(denominator);
  const auto step = at::_foreach_div(at::_foreach_mul(p.gradients, rate), denominator);
  if (options.momentum > 0) {
    const auto& velocity = p.states.back();
    at::_foreach_mul_(velocity, options.momentum);
    at::_foreach_add_(velocity, step);
    at::_foreach_sub_(p.values, velocity);
  } else {
    at::_foreach_sub_(p.values, step);
  }
}

void update(const AdagradOptions& options, const DeviceParameters& p, const at::Tensor& rate) {
  const auto& accumulator = p.states[0];
  at::_foreach_addcmul_(accumulator, p.gradients, p.gradients);
  auto denominator = at::_foreach_add(accumulator, options.epsilon);
  at::_foreach_sqrt_(denominator);
  at::_foreach_sub_(p.values, at::_foreach_div(at::_foreach_mul(p.gradients, rate), denominator));
}

}  // namespace

DeviceUpdate::DeviceUpdate(const Optimizer& optimizer, const at::TensorOptions& options)
    : optimizer_(optimizer),
      rate_(at::zeros({}, options)),
      keep_(at::ones({}, options)),
      far_step_(at::full({}, 3e38, options.dtype(at::kFloat))) {}

void DeviceUpdate::begin(const UpdateStep& step) {
  step_ = step;
  const auto* adam = dynamic_cast<const AdamRule*>(&optimizer_.rule());
  rate_.fill_(adam == nullptr ? step.learning_rate : adam->rate(step));
  keep_.fill_(1 - step.learning_rate * optimizer_.options().weight_decay.value_or(0));
}

void DeviceUpdate::apply(const DeviceParameters& parameters, double divide_by) const {
  const at::NoGradGuard no_grad;
  const DeviceParameters ready{parameters.values, scaled(parameters.gradients, divide_by), parameters.states};
  if (optimizer_.options().weight_decay.value_or(0) != 0) at::_foreach_mul_(ready.values, keep_);
  const auto* rule = &optimizer_.rule();
  if (const auto* sgd = dynamic_cast<const SGDRule*>(rule)) {
    update(sgd->options(), ready, rate_);
  } else if (const auto* adam = dynamic_cast<const AdamRule*>(rule)) {
    update(adam->options(), ready, rate_, far_step_);
  } else if (const auto* rmsprop = dynamic_cast<const RMSpropRule*>(rule)) {
    update(rmsprop->options(), ready, rate_);
  } else if (const auto* adagrad = dynamic_cast<const AdagradRule*>(rule)) {
    update(adagrad->options(), ready, rate_);
  } else {
    apply_on_host(ready);
  }
}

// Divided and clipped.
Tensors DeviceUpdate::scaled(const Tensors& gradients, double divide_by) const {
  const auto& options = optimizer_.options();
  auto result = divide_by == 1 ? gradients : at::_foreach_mul(gradients, 1 / divide_by);
  if (options.clipvalue) {
    result = at::_foreach_clamp_max(result, *options.clipvalue);
    at::_foreach_clamp_min_(result, -*options.clipvalue);
  } else if (options.clipnorm || options.global_clipnorm) {
    auto norms = at::_foreach_norm(result);
    if (options.global_clipnorm) norms.assign(norms.size(), at::linalg_vector_norm(at::stack(norms)));
    const double bound = options.clipnorm.value_or(options.global_clipnorm.value_or(0));
    for (std::size_t i = 0; i < result.size(); ++i) result[i] = result[i] * (bound / norms[i].clamp_min(bound));
  }
  return result;
}

void DeviceUpdate::apply_on_host(const DeviceParameters& parameters) const {
  const auto update_one = [&]<class T>(T, std::size_t i) {
    const auto value = parameters.values[i].cpu().contiguous(), gradient = parameters.gradients[i].cpu().contiguous();
    Tensors state;
    std::vector<T*> pointers;
    for (const auto& tensors : parameters.states) {
      state.push_back(tensors[i].cpu().contiguous());
      pointers.push_back(state.back().template mutable_data_ptr<T>());
    }
    const auto count = static_cast<std::size_t>(value.numel());
    optimizer_.rule().update(step_, std::span(value.template mutable_data_ptr<T>(), count),
                             std::span(gradient.template const_data_ptr<T>(), count), pointers);
    parameters.values[i].copy_(value);
    for (std::size_t k = 0; k < state.size(); ++k) parameters.states[k][i].copy_(state[k]);
  };
  for (std::size_t i = 0; i < parameters.values.size(); ++i) {
    if (rate_.scalar_type() == at::kDouble) {
      update_one(double(), i);
    } else {
      update_one(float(), i);
    }
  }
}

}  // namespace lockstep
