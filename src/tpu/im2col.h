// Convolutions as products of matrices (im2col; Chellapilla, Puri, Simard: High Performance Convolutional Neural
// Networks for Document Processing, 2006).
#pragma once

#include <utility>

#include "tpu/call.h"

namespace lockstep::tpu {

// The options of aten::convolution; stride, padding and dilation of each spatial dimension.
struct ConvolutionOptions {
  Sizes stride, padding, dilation, output_padding;
  bool transposed = false;
  std::int64_t groups = 1;
};

// The permutation that makes [batch, ..., channels] of [batch, channels, ...] with as many spatial dimensions.
Sizes channels_last(std::size_t spatial);

// True where a product is the fastest way: on CPUs where a window has at most 64 elements, of at most 25 places. So the
// product copies at most 25 times x.
bool is_fast_by_im2col(Call& call, const Sizes& weight, const ConvolutionOptions& options);

// x * weight + bias, of sizes `sizes`. There is no bias where its name is empty.
Value convolve_by_im2col(Call& call, const Value& x, const Value& weight, const Value& bias, const Sizes& sizes,
                         const ConvolutionOptions& options);

// The gradients of a weight of sizes `weight`, and of the bias, for the result's.
std::pair<Value, Value> gradients_by_im2col(Call& call, const Value& gradient, const Value& x, const Sizes& weight,
                                            const ConvolutionOptions& options);

}  // namespace lockstep::tpu
