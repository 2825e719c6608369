// A layer of Sequential: a handle of a description, whose module is made when the input's sizes are known.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/ops/tensor.h"
#include "lockstep/strategy/module_factory.h"

namespace lockstep {

class Sequential;
class ShardedEmbedding;

// One size for both directions, or {height, width}.
struct Size2D {
  Size2D(std::int64_t both) : height(both), width(both) {}  // NOLINT: 3 is a size
  Size2D(std::int64_t h, std::int64_t w) : height(h), width(w) {}
  std::int64_t height, width;
};

// Elementwise (softmax: over the last dimension). By name: "linear", "relu", "relu6", "leaky_relu", "elu", "selu",
// "gelu", "sigmoid", "hard_sigmoid", "tanh", "softmax", "log_softmax", "softplus", "softsign", "silu" or "swish",
// "mish", "exponential"; or a function.
class ActivationFunction {
 public:
  ActivationFunction(const char* name);  // NOLINT: Keras takes names. Throws InvalidArgument for any other.
  ActivationFunction(std::string name, std::function<Tensor(const Tensor&)> function);
  Tensor operator()(const Tensor& x) const { return function_ ? function_(x) : x; }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::function<Tensor(const Tensor&)> function_;  // empty: linear
};

// Initial values. By name: "zeros", "ones", "glorot_uniform", "glorot_normal", "he_uniform", "he_normal",
// "lecun_uniform", "lecun_normal", "uniform" (-0.05 to 0.05), "normal" (deviation 0.05); or a function that fills the
// tensor.
class Initializer {
 public:
  Initializer(const char* name);  // NOLINT: Keras takes names. Throws InvalidArgument for any other.
  explicit Initializer(std::function<void(Tensor&)> fill) : fill_(std::move(fill)) {}
  void fill(Tensor& tensor) const { fill_(tensor); }

 private:
  std::function<void(Tensor&)> fill_;
};

// A layer made for inputs of known sizes: its module (null when it has no parameters) and what it computes.
struct BuiltLayer {
  std::shared_ptr<torch::nn::Module> module;
  std::function<Tensor(const Tensor&)> forward;
};

// The description of a layer. Immutable. The base of one of your own that infers sizes.
class LayerSpec {
 public:
  virtual ~LayerSpec() = default;
  virtual std::string kind() const = 0;  // such as "conv2d": layers are called conv2d, conv2d_1, ...

  // `input`: a batch of one, zeros. Throws InvalidArgument when the layer cannot take inputs of this shape or dtype.
  virtual BuiltLayer build(const Tensor& input) const = 0;
};

namespace internal {
struct LayerUse;  // the library's own
}

// A shared handle: copies are the same layer. A layer that stands twice in a model has its weights once, as in Keras. A
// layer is part of one model: building another model with it throws InvalidArgument.
class Layer {
 public:
  explicit Layer(std::shared_ptr<const LayerSpec> spec);  // throws InvalidArgument for null
  // The nested model, with its weights, becomes a part of the model that gets this layer, and is used through that
  // model alone. The nested model's own fit, evaluate, predict, saving and loading throw InvalidArgument from then on.
  explicit Layer(const Sequential& nested);
  Layer(const ShardedEmbedding& embedding);  // NOLINT: a layer like the others. Integers [batch, ...]
  const LayerSpec& spec() const { return *spec_; }

 private:
  friend struct internal::LayerUse;
  std::shared_ptr<const LayerSpec> spec_;
  std::shared_ptr<internal::LayerUse> use_;
};

}  // namespace lockstep
