// Pooling of images, forward and backward, on plain arrays of float.
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
};

const PoolingKernels& pooling_kernels();

// Sums of windows times `factor`; windows of planes that have no padding and lie inside the image.
struct AveragePoolingKernels {
  void (*planes)(const Pooling& pooling, std::size_t planes, const float* input, float factor, float* output);
  void (*planes_backward)(const Pooling& pooling, std::size_t planes, const float* grad_output, float factor,
                          float* grad_input);
};

const AveragePoolingKernels& average_pooling_kernels();

}  // namespace lockstep::kernels
