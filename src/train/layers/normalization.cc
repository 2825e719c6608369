#include <ATen/ATen.h>

#include <cmath>

#include "ops/traced_program.h"
#include "train/layers/specs.h"

namespace lockstep {
namespace {

void require_epsilon(const char* layer, double epsilon) {
  require(epsilon >= 0 && !std::isinf(epsilon), text(layer, ": epsilon"), epsilon, "0 or more, and finite");
}

struct BatchNormModule : train::ParameterModule {
  BatchNormModule(std::int64_t channels, const BatchNormalizationOptions& settings) : options(settings) {
    weight = make("weight", {channels}, "ones", options.scale);
    bias = make("bias", {channels}, "zeros", options.center);
    running_mean = register_buffer("running_mean", at::zeros({channels}));
    running_var = register_buffer("running_var", at::ones({channels}));
  }

  // Normalizes dimension 1.
  Tensor forward(const Tensor& x) {
    if (!is_training()) {
      return at::batch_norm(x, weight, bias, running_mean, running_var, /*training=*/false, 0, options.epsilon, false);
    }
    // LibTorch stores the batch's statistics themselves when its momentum is 1; its variance is the unbiased one.
    auto mean = at::zeros_like(running_mean);
    auto variance = at::ones_like(running_var);
    const auto y =
        at::batch_norm(x, weight, bias, mean, variance, /*training=*/true, /*momentum=*/1, options.epsilon, false);
    const at::NoGradGuard no_grad;
    running_mean.mul_(options.momentum).add_(mean, 1 - options.momentum);
    running_var.mul_(options.momentum);
    add_biased(variance, x);
    return y;
  }

  // Adds the batch's biased variance, computed from the unbiased one.
  void add_biased(const Tensor& unbiased, const Tensor& x) {
    const double values_of_an_example = static_cast<double>(x.numel()) / static_cast<double>(x.size(1) * x.size(0));
    if (auto* const trace = ops::current_trace()) {
      const auto count = trace->counted(x.size(0)) * values_of_an_example;
      running_var.add_(unbiased * ((1 - options.momentum) * (count - 1).clamp_min(0) / count.clamp_min(1)));
      return;
    }
    const double count = values_of_an_example * static_cast<double>(x.size(0));
    if (count > 1) running_var.add_(unbiased, (1 - options.momentum) * (count - 1) / count);
  }

  BatchNormalizationOptions options;
  Tensor running_mean, running_var;
};

// Returns the dimension of the features of `input`.
std::int64_t axis_of(const BatchNormalizationOptions& options, const Tensor& input) {
  const auto given = options.axis.value_or(input.dim() > 3 ? 1 : -1);
  const auto axis = given < 0 ? given + input.dim() : given;
  if (axis >= 1 && axis < input.dim()) return axis;
  throw InvalidArgument(text("BatchNormalization: axis is ", given, "; for inputs of shape ", input.sizes(),
                             " it must be from 1 to ", input.dim() - 1, ", or from ", 1 - input.dim(), " to -1"));
}

}  // namespace

BatchNormalization::BatchNormalization(BatchNormalizationOptions options)
    : Layer(train::spec_of("batch_normalization", [options](const Tensor& input) -> BuiltLayer {
        if (input.dim() < 2) {
          throw InvalidArgument(
              text("BatchNormalization: the input has shape ", input.sizes(), "; it must be [batch, channels, ...]"));
        }
        const auto axis = axis_of(options, input);
        auto module = std::make_shared<BatchNormModule>(input.size(axis), options);
        if (axis == 1) return {module, [module](const Tensor& x) { return module->forward(x); }};
        return {module,
                [module, axis](const Tensor& x) { return module->forward(x.movedim(axis, 1)).movedim(1, axis); }};
      })) {
  require(options.momentum >= 0 && options.momentum <= 1, "BatchNormalization: momentum", options.momentum,
          "from 0 to 1");
  require_epsilon("BatchNormalization", options.epsilon);
}

LayerNormalization::LayerNormalization(LayerNormalizationOptions options)
    : Layer(train::spec_of("layer_normalization", [options](const Tensor& input) {
        auto module = std::make_shared<train::ParameterModule>();
        const auto features = input.size(-1);
        module->weight = module->make("weight", {features}, "ones", options.scale);
        module->bias = module->make("bias", {features}, "zeros", options.center);
        return BuiltLayer{module, [module, features, epsilon = options.epsilon](const Tensor& x) {
                            return at::layer_norm(x, {features}, module->weight, module->bias, epsilon);
                          }};
      })) {
  require_epsilon("LayerNormalization", options.epsilon);
}

}  // namespace lockstep
