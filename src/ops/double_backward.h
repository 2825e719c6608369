// Backward passes that will be differentiated themselves.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

namespace lockstep::ops {

// The gradients of `inputs` (undefined for inputs that are undefined or need none), themselves differentiable.
// `plain(inputs)` computes with LibTorch's operators what our kernel computed; `grad_output` is the gradient of its
// result.
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

}  // namespace lockstep::ops
