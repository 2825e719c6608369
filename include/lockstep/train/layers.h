// Layers of Sequential. A Layer is a handle of a description; modules are made when the input's sizes are known. Names,
// defaults and initial values are those of keras.layers; images are [batch, channels, height, width], as in LibTorch.
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
#include "lockstep/strategy/sharded_embedding.h"

namespace lockstep {

class Sequential;

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

struct Conv2DOptions {
  Size2D strides = 1;
  std::string padding = "valid";  // or "same"
  Size2D dilation_rate = 1;
  std::int64_t groups = 1;
  ActivationFunction activation = "linear";
  bool use_bias = true;
  Initializer kernel_initializer = "glorot_uniform";
  Initializer bias_initializer = "zeros";
};
class Conv2D : public Layer {
 public:
  Conv2D(std::int64_t filters, Size2D kernel_size, Conv2DOptions options = {});
};

struct Pooling2DOptions {
  Size2D strides = 0;             // 0: the pool's size
  std::string padding = "valid";  // or "same"; averages count real elements only
};
class MaxPooling2D : public Layer {
 public:
  explicit MaxPooling2D(Size2D pool_size = 2, Pooling2DOptions options = {});
};
class AveragePooling2D : public Layer {
 public:
  explicit AveragePooling2D(Size2D pool_size = 2, Pooling2DOptions options = {});
};
class GlobalAveragePooling2D : public Layer {
 public:
  GlobalAveragePooling2D();
};

class Flatten : public Layer {
 public:
  Flatten();
};

// Over the last dimension. The module's weight is [units, inputs], as in LibTorch.
struct DenseOptions {
  ActivationFunction activation = "linear";
  bool use_bias = true;
  Initializer kernel_initializer = "glorot_uniform";
  Initializer bias_initializer = "zeros";
};
class Dense : public Layer {
 public:
  explicit Dense(std::int64_t units, DenseOptions options = {});
};

class Activation : public Layer {
 public:
  explicit Activation(const ActivationFunction& function);
};

// Zeroes a share `rate` of the elements in training and scales the others by 1 / (1 - rate).
class Dropout : public Layer {
 public:
  explicit Dropout(double rate);
};

// Normalizes each feature over the batch and all other dimensions. Running statistics: momentum * old + (1 - momentum)
// * batch, with the biased variance.
struct BatchNormalizationOptions {
  // The features' dimension. Empty: the last one of inputs with up to three dimensions, 1 for inputs with more.
  std::optional<std::int64_t> axis = {};
  double momentum = 0.99;
  double epsilon = 1e-3;
  bool center = true;
  bool scale = true;
};
class BatchNormalization : public Layer {
 public:
  explicit BatchNormalization(BatchNormalizationOptions options = {});
};

// Over the last dimension.
struct LayerNormalizationOptions {
  double epsilon = 1e-3;
  bool center = true;
  bool scale = true;
};
class LayerNormalization : public Layer {
 public:
  explicit LayerNormalization(LayerNormalizationOptions options = {});
};

// Integers [batch, ...] to [batch, ..., output_dim].
struct EmbeddingOptions {
  Initializer embeddings_initializer = "uniform";
};
class Embedding : public Layer {
 public:
  Embedding(std::int64_t input_dim, std::int64_t output_dim, EmbeddingOptions options = {});
};

// Any torch module with `Tensor forward(Tensor)`: `make` returns a module holder or a shared_ptr, another one at each
// call.
class ModuleLayer : public Layer {
 public:
  template <class Factory>
  explicit ModuleLayer(const Factory& make, std::string kind = "module")
      : ModuleLayer(internal::maker(make), internal::forward_of<Factory>(), std::move(kind)) {}

 private:
  ModuleLayer(internal::MakeModule make, internal::ForwardOfModule forward, std::string kind);
};

}  // namespace lockstep
