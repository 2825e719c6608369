// Activations and initial values, by their names in Keras.
#include <ATen/ATen.h>

#include <cmath>
#include <map>

#include "train/layers/specs.h"

namespace lockstep {
namespace {

using Function = std::function<Tensor(const Tensor&)>;

const std::map<std::string, Function>& activations() {
  static const std::map<std::string, Function> functions{
      {"linear", nullptr},
      {"relu", [](const Tensor& x) { return at::relu(x); }},
      {"relu6", [](const Tensor& x) { return at::relu6(x); }},
      {"leaky_relu", [](const Tensor& x) { return at::leaky_relu(x, 0.2); }},
      {"elu", [](const Tensor& x) { return at::elu(x); }},
      {"selu", [](const Tensor& x) { return at::selu(x); }},
      {"gelu", [](const Tensor& x) { return at::gelu(x); }},
      {"sigmoid", [](const Tensor& x) { return at::sigmoid(x); }},
      {"hard_sigmoid", [](const Tensor& x) { return at::hardsigmoid(x); }},
      {"tanh", [](const Tensor& x) { return at::tanh(x); }},
      {"softmax", [](const Tensor& x) { return at::softmax(x, -1); }},
      {"log_softmax", [](const Tensor& x) { return at::log_softmax(x, -1); }},
      {"softplus", [](const Tensor& x) { return at::softplus(x); }},
      {"softsign", [](const Tensor& x) { return x / (1 + at::abs(x)); }},
      {"silu", [](const Tensor& x) { return at::silu(x); }},
      {"swish", [](const Tensor& x) { return at::silu(x); }},
      {"mish", [](const Tensor& x) { return at::mish(x); }},
      {"exponential", [](const Tensor& x) { return at::exp(x); }},
  };
  return functions;
}

// Return the number of inputs, or of outputs, of a weight [outputs, inputs, ...], as keras.initializers.compute_fans.
double numel_over(const Tensor& weight, std::int64_t dimension) {
  return static_cast<double>(weight.numel()) / (weight.dim() < 2 ? 1 : static_cast<double>(weight.size(dimension)));
}
double fan_in(const Tensor& weight) { return numel_over(weight, 0); }
double fan_out(const Tensor& weight) { return numel_over(weight, 1); }

void fill_uniform(Tensor& tensor, double variance) {
  const double limit = std::sqrt(3 * variance);
  tensor.uniform_(-limit, limit);
}

// Fills with a normal distribution that is cut off at two deviations; the divisor makes its deviation the wanted one.
void fill_truncated_normal(Tensor& tensor, double variance) {
  const double deviation = std::sqrt(variance) / 0.87962566103423978;
  const double edge = std::erf(std::sqrt(2.0));  // the probability of values within two deviations
  tensor.uniform_(-edge, edge).erfinv_().mul_(deviation * std::sqrt(2.0));
}

const std::map<std::string, std::function<void(Tensor&)>>& initializers() {
  static const std::map<std::string, std::function<void(Tensor&)>> functions{
      {"zeros", [](Tensor& t) { t.zero_(); }},
      {"ones", [](Tensor& t) { t.fill_(1); }},
      {"uniform", [](Tensor& t) { t.uniform_(-0.05, 0.05); }},
      {"normal", [](Tensor& t) { t.normal_(0, 0.05); }},
      {"glorot_uniform", [](Tensor& t) { fill_uniform(t, 2 / (fan_in(t) + fan_out(t))); }},
      {"glorot_normal", [](Tensor& t) { fill_truncated_normal(t, 2 / (fan_in(t) + fan_out(t))); }},
      {"he_uniform", [](Tensor& t) { fill_uniform(t, 2 / fan_in(t)); }},
      {"he_normal", [](Tensor& t) { fill_truncated_normal(t, 2 / fan_in(t)); }},
      {"lecun_uniform", [](Tensor& t) { fill_uniform(t, 1 / fan_in(t)); }},
      {"lecun_normal", [](Tensor& t) { fill_truncated_normal(t, 1 / fan_in(t)); }},
  };
  return functions;
}

const auto& find(const auto& named, const char* what, const std::string& name) {
  const auto found = named.find(name);
  if (found == named.end())
    throw InvalidArgument(text("no ", what, " is called \"", name, "\"; there are ", names_in(named)));
  return found->second;
}

}  // namespace

ActivationFunction::ActivationFunction(const char* name)
    : name_(name), function_(find(activations(), "activation", name)) {}

ActivationFunction::ActivationFunction(std::string name, std::function<Tensor(const Tensor&)> function)
    : name_(std::move(name)), function_(std::move(function)) {}

Initializer::Initializer(const char* name) : fill_(find(initializers(), "initializer", name)) {}

Activation::Activation(const ActivationFunction& function)
    : Layer(train::spec_of("activation", [function](const Tensor&) {
        return BuiltLayer{nullptr, function};
      })) {}

}  // namespace lockstep
