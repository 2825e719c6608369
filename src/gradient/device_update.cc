#include "gradient/device_update.h"

#include <ATen/ATen.h>

#include "gradient/device_rules.h"

namespace lockstep::gradient {

DeviceUpdate::DeviceUpdate(const Optimizer& optimizer, const at::TensorOptions& options)
    : optimizer_(optimizer), rule_(make_device_rule(optimizer_.rule(), options)) {}

std::vector<double> DeviceUpdate::numbers(const UpdateStep& step) const {
  auto numbers = rule_->numbers(step);
  if (decay() != 0) numbers.insert(numbers.begin(), 1 - step.learning_rate * decay());
  return numbers;
}

void DeviceUpdate::apply(const DeviceParameters& parameters, double divide_by,
                         const std::vector<at::Tensor>& numbers) const {
  const at::NoGradGuard no_grad;
  auto of_rule = numbers.begin();
  if (decay() != 0) at::_foreach_mul_(parameters.values, *of_rule++);
  rule_->update({parameters.values, scaled(parameters.gradients, divide_by), parameters.states},
                {of_rule, numbers.end()});
}

// The gradients divided by divide_by, then clipped.
std::vector<at::Tensor> DeviceUpdate::scaled(const std::vector<at::Tensor>& gradients, double divide_by) const {
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

}  // namespace lockstep::gradient
