// Pooling of images, alone or together with a convolution, bias and ReLU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::kernels {

// A window that moves over an image. Positions of the window are numbered row by row, size_h * size_w <= 256; each
// output's window holds at least one element of the image.
struct Pooling {
  std::int64_t in_h, in_w, out_h, out_w;
  std::int64_t size_h, size_w, stride_h, stride_w, padding_h, padding_w, dilation_h = 1, dilation_w = 1;

  // No two windows share an element, and none reaches beyond the image.
  bool tiles() const {
    return size_h <= stride_h && size_w <= stride_w && padding_h == 0 && padding_w == 0 && dilation_h == 1 &&
           dilation_w == 1 && (out_h - 1) * stride_h + size_h <= in_h && (out_w - 1) * stride_w + size_w <= in_w;
  }
};

// Arrays of winners are longer than the outputs by this much: kernels load whole vectors.
constexpr std::size_t kWinnerSlack = 64;

// `count` planes are [height, width]; images are [height, width, channels], one after the other. A winner is the
// position in the window of the largest element: the first of several, the last NaN if there is one, as LibTorch's
// max_pool2d chooses. No arrays overlap. Any thread may call.
struct PoolingKernels {
  // `winner` may be null.
  void (*max_planes)(const Pooling& pooling, std::size_t planes, const float* input, float* output,
                     std::uint8_t* winner);
  void (*max_images)(const Pooling& pooling, std::size_t images, std::size_t channels, const float* input,
                     float* output, std::uint8_t* winner);

  // Each output's gradient goes to the winner of its window; all of `grad_input` is written.
  void (*max_planes_backward)(const Pooling& pooling, std::size_t planes, const float* grad_output,
                              const std::uint8_t* winner, float* grad_input);
  void (*max_images_backward)(const Pooling& pooling, std::size_t images, std::size_t channels,
                              const float* grad_output, const std::uint8_t* winner, float* grad_input);

  // Sums of windows times `factor`; windows of planes that have no padding and lie inside the image.
  void (*average_planes)(const Pooling& pooling, std::size_t planes, const float* input, float factor, float* output);
  void (*average_planes_backward)(const Pooling& pooling, std::size_t planes, const float* grad_output, float factor,
                                  float* grad_input);
};

const PoolingKernels& pooling_kernels();

// Convolution, bias, ReLU and 2 x 2 max-pooling of images with few channels in one pass: what the convolution computes
// is never written to memory.

// Strides and dilations are 1; padding is in the image already.
struct ConvPool {
  std::int64_t channels, in_h, in_w;
  std::int64_t filters, size_h, size_w;

  std::int64_t taps() const { return channels * size_h * size_w; }
  std::int64_t out_h() const { return (in_h - size_h + 1) / 2; }
  std::int64_t out_w() const { return (in_w - size_w + 1) / 2; }
  std::int64_t pixels() const { return out_h() * out_w(); }
};

// Images and outputs are [channels][height][width], weights [filters][taps]. Any thread may call.
struct ConvPoolKernels {
  // Bytes of winners for an image, in an order of the kernel's own.
  std::int64_t (*winner_count)(const ConvPool& shape);

  // output = max_pool2d(relu(conv2d(input, weight) + bias), 2). `winner` gets the position in each
  // window that has the largest value, or that none is above zero.
  void (*forward)(const ConvPool& shape, std::size_t images, const float* input, const float* weight, const float* bias,
                  float* output, std::uint8_t* winner);

  // The gradients of weight and bias.
  void (*backward)(const ConvPool& shape, std::size_t images, const float* input, const float* grad_output,
                   const std::uint8_t* winner, float* grad_weight, float* grad_bias);
};

const ConvPoolKernels& conv_pool_kernels();

}  // namespace lockstep::kernels
