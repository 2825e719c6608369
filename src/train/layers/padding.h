// Keras's "valid" and "same" padding of images.
#pragma once

#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <array>
#include <string>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/train/layers.h"

namespace lockstep::train {

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
  if (padding != "valid" && padding != "same") {
    throw InvalidArgument(text(layer, ": padding is \"", padding, "\"; it must be \"valid\" or \"same\""));
  }
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

// An image, and how much an operator of LibTorch is to pad it on both sides.
struct PaddedImage {
  Tensor x;
  std::array<std::int64_t, 2> padding;
};

// Adds zeros to the image here only where the two sides differ.
inline PaddedImage pad_unevenly(const Tensor& x, const Padding& padding) {
  if (padding.symmetric()) return {x, padding.before()};
  return {at::constant_pad_nd(x, padding.as_torch()), {}};
}

inline std::array<std::int64_t, 2> pair(const Size2D& size) { return {size.height, size.width}; }

}  // namespace lockstep::train
