// Convolution, bias, ReLU and 2 x 2 max-pooling of images with few channels in one pass: what the convolution computes
// is never written to memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::kernels {

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
