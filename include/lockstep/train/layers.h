// Layers of Sequential (layer.h). Names, defaults and initial values are those of keras.layers; images are [batch,
// channels, height, width], as in LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/train/layer.h"

namespace lockstep {

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
