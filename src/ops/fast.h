// Operators of ours: the calls that use them, their second derivatives, and the memory of their gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

namespace lockstep::ops {

// True where our operators may replace LibTorch's: unless LOCKSTEP_KERNELS is "libtorch", which is read once.
bool fast_operators();

// True where one operator of ours may replace several of LibTorch's: not under autocast, where each operator of
// LibTorch chooses its own precision.
bool fast_fusion();

// A tensor that kernels can read: float32 in a CPU's memory, with elements, no lazy negation, no hooks
// (parameter_hook.h), and without forward-mode derivatives.
bool fast(const at::Tensor& x);

// A gradient without a lazy negation.
inline at::Tensor resolved(const at::Tensor& gradient) { return gradient.is_neg() ? gradient.resolve_neg() : gradient; }

// Backward passes that will be differentiated themselves. The gradients of `inputs` (undefined for inputs that are
// undefined or need none), themselves differentiable. `plain(inputs)` computes with LibTorch's operators what our
// kernel computed; `grad_output` is the gradient of its result.
template <class Plain>
std::vector<at::Tensor> double_backward(const Plain& plain, const std::vector<at::Tensor>& inputs,
                                        const at::Tensor& grad_output) {
  // Differentiates with respect to views, so that the hooks of the inputs themselves do not run here: they run once,
  // later.
  std::vector<at::Tensor> views, wanted;
  for (const auto& input : inputs) {
    const bool needed = input.defined() && input.requires_grad();
    views.push_back(needed ? input.view_as(input) : input);
    if (needed) wanted.push_back(views.back());
  }
  const auto found = torch::autograd::grad({plain(views)}, wanted, {grad_output}, /*retain_graph=*/true,
                                           /*create_graph=*/true, /*allow_unused=*/true);
  std::vector<at::Tensor> gradients;
  auto next = found.begin();
  for (const auto& input : inputs) {
    gradients.push_back(input.defined() && input.requires_grad() ? *next++ : at::Tensor());
  }
  return gradients;
}

// Memory into which our operators write the gradients of parameters directly, such as a buffer that other processes
// read.

// Offers `memory`, contiguous and of the parameter's shape and dtype, for the gradient of the parameter whose values
// lie at `values`: in this thread's next backward, until clear_gradient_memory.
void offer_gradient_memory(const void* values, at::Tensor memory);
void clear_gradient_memory();

// Returns the memory offered for the parameter at `values`, once only; else a new tensor of `sizes`.
at::Tensor take_gradient_memory(const void* values, at::IntArrayRef sizes, const at::TensorOptions& options);

// Gradients for y = x weight^T: gradient of y [..., outputs], weight [outputs, inputs], x [..., inputs]. Use our
// kernels where these can, else LibTorch's. Outside of autograd.
at::Tensor linear_input_gradient(const at::Tensor& gradient, const at::Tensor& weight);
at::Tensor linear_weight_gradient(const at::Tensor& gradient, const at::Tensor& x);

}  // namespace lockstep::ops
