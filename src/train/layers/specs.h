// The specs of layers that others are fused with, and what layers have in common.
#pragma once

#include <ATen/ops/constant_pad_nd.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/train/layers.h"

namespace lockstep::train {

// Returns the spec of layers of this kind, which build(input) makes.
std::shared_ptr<const LayerSpec> spec_of(std::string kind, std::function<BuiltLayer(const Tensor& input)> build);

// Keras's "valid" and "same" padding of images.

// A window that moves over an image.
struct Window {
  Size2D size;
  Size2D strides;
  Size2D dilation = 1;
};

// Elements added at the edges: the amounts before and after, in each direction.
struct Padding {
  std::array<std::int64_t, 2> height{}, width{};

  bool none() const { return height == decltype(height){} && width == decltype(width){}; }
  bool symmetric() const { return height[0] == height[1] && width[0] == width[1]; }
  std::array<std::int64_t, 2> before() const { return {height[0], width[0]}; }
  std::array<std::int64_t, 4> as_torch() const { return {width[0], width[1], height[0], height[1]}; }
};

inline void check_padding_name(const char* layer, const std::string& padding) {
  require(padding == "valid" || padding == "same", text(layer, ": padding"), text('"', padding, '"'),
          R"("valid" or "same")");
}

// "same" makes ceil(size / stride) outputs; where the sum is odd, the larger half comes after.
inline Padding padding_of(const std::string& padding, const Tensor& image, const Window& window) {
  if (padding == "valid") return {};
  const auto one = [](std::int64_t size, std::int64_t window_size, std::int64_t stride, std::int64_t dilation) {
    const auto outputs = (size + stride - 1) / stride;
    const auto reach = (outputs - 1) * stride + (window_size - 1) * dilation + 1;
    const auto total = std::max<std::int64_t>(reach - size, 0);
    return std::array<std::int64_t, 2>{total / 2, total - total / 2};
  };
  return {one(image.size(2), window.size.height, window.strides.height, window.dilation.height),
          one(image.size(3), window.size.width, window.strides.width, window.dilation.width)};
}

// Adds zeros to the image here only where the two sides differ. An operator of LibTorch is to add `padding`, which is
// then none.
inline Tensor pad_unevenly(const Tensor& x, Padding& padding) {
  if (padding.symmetric()) return x;
  return at::constant_pad_nd(x, std::exchange(padding, {}).as_torch());
}

inline std::array<std::int64_t, 2> pair(const Size2D& size) { return {size.height, size.width}; }

// The torch module of a layer with a weight and a bias.
struct ParameterModule : torch::nn::Module {
  // Registers `name` with the given sizes, filled by `initializer`; an undefined tensor when not `wanted`.
  Tensor make(const std::string& parameter_name, at::IntArrayRef sizes, const Initializer& initializer,
              bool wanted = true) {
    if (!wanted) return {};
    Tensor tensor = at::empty(sizes);
    initializer.fill(tensor);
    return register_parameter(parameter_name, tensor);
  }

  Tensor weight, bias;
};

inline void require_positive(const char* what, std::int64_t value) { require(value >= 1, what, value, "at least 1"); }

// Throws InvalidArgument unless the input has `dims` dimensions, batch included.
inline void require_dims(const char* layer, const Tensor& input, std::int64_t dims, const char* names) {
  if (input.dim() == dims) return;
  throw InvalidArgument(text(layer, ": the input has shape ", input.sizes(), "; it must be ", names));
}

// The spec of Conv2D, for the layers that are fused with it.
class Conv2DSpec final : public LayerSpec {
 public:
  Conv2DSpec(std::int64_t filters, Size2D kernel_size, Conv2DOptions options);
  std::string kind() const override { return "conv2d"; }
  BuiltLayer build(const Tensor& input) const override;

  const Window& window() const { return window_; }
  const Conv2DOptions& options() const { return options_; }

 private:
  std::int64_t filters_;
  Window window_;
  Conv2DOptions options_;
};

// The specs of MaxPooling2D and AveragePooling2D, for the layers that are fused with them.
class PoolingSpec final : public LayerSpec {
 public:
  using Pool = Tensor (*)(const Tensor&, const Window&, const Padding&);

  PoolingSpec(std::string kind, Pool pool, Size2D size, const Pooling2DOptions& options);
  std::string kind() const override { return kind_; }
  BuiltLayer build(const Tensor& input) const override;

  const Window& window() const { return window_; }
  const std::string& padding() const { return padding_; }

 private:
  std::string kind_;
  Pool pool_;
  Window window_;
  std::string padding_;
};

}  // namespace lockstep::train
