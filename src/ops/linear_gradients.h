// The products of a dense layer's backward.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::ops {

// Gradients for y = x weight^T: gradient of y [..., outputs], weight [outputs, inputs], x [..., inputs]. Use our
// kernels where these can, else LibTorch's. Outside of autograd.
at::Tensor linear_input_gradient(const at::Tensor& gradient, const at::Tensor& weight);
at::Tensor linear_weight_gradient(const at::Tensor& gradient, const at::Tensor& x);

}  // namespace lockstep::ops
