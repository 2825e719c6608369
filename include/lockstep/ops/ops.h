// Operators for modules of your own that do in one pass what LibTorch does in several. Each computes what its comment
// says, for any tensor that LibTorch takes there; float32 tensors in a CPU's memory go through kernels of ours, others
// through LibTorch's. All can be differentiated, twice too. Any thread may call. They throw c10::Error, as LibTorch.
//
// torch::max_pool2d and torch::linear need nothing of this: for CPU tensors our kernels serve them wherever they are
// called (but torch::nn::Linear of the C++ front end calls addmm, which stays LibTorch's). LOCKSTEP_KERNELS=libtorch in
// the environment leaves everything to LibTorch.
#pragma once

#include <c10/util/ArrayRef.h>

#include "lockstep/ops/tensor.h"

namespace lockstep::ops {

// torch::max_pool2d(torch::relu(torch::conv2d(x, weight, bias, 1, padding)), 2). Fast for few channels:
// x [batch, channels, height, width], weight [filters, channels, h, w], channels * h * w <= 64, and x needs no gradient
// (as images do not).
Tensor conv2d_relu_max_pool2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                              at::IntArrayRef padding = 0);

// torch::avg_pool2d without padding: x [batch, channels, height, width] or [channels, height, width].
Tensor avg_pool2d(const Tensor& x, at::IntArrayRef kernel_size, at::IntArrayRef stride = {});

// torch::relu(torch::linear(x, weight, bias)): x [..., inputs], weight [units, inputs], bias [units].
Tensor linear_relu(const Tensor& x, const Tensor& weight, const Tensor& bias = {});

// The negative logarithm of the softmax at the label, for each example: torch::nn::functional::cross_entropy without a
// reduction, but classes come last. logits [..., classes], labels [...] of int64 from 0 to classes - 1.
Tensor softmax_cross_entropy(const Tensor& logits, const Tensor& labels);

}  // namespace lockstep::ops
