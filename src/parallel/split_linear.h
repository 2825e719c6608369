// Linear layers: the operators that compute them, and one whose backward can be split into the gradient of its input
// and, later, that of its weight (Qi et al. 2024).
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "gradient/tensor_map.h"
#include "lockstep/ops/tensor.h"
#include "ops/parameter_hook.h"

namespace lockstep::parallel {

// x weight^T + bias; the bias may be undefined.
struct LinearCall {
  at::Tensor x, weight, bias;
};

// The call, where its argument `i` is the parameter as the weight of a linear layer: torch::linear(x, weight, bias),
// x.matmul(weight.t()), mm, and addmm(bias, x, weight.t()).
std::optional<LinearCall> linear_call(const ops::OperatorCall& call, std::size_t i,
                                      const gradient::WeakTensor& parameter);

// Gradients of weights that backward has left for later. LibTorch gives the object to the threads of devices, which
// compute backward.
class WeightGradients final : public c10::DebugInfoBase {
 public:
  // Computes the gradients that are left and adds them to the weights', in the order of backward.
  void compute();

  void add(std::function<void()> compute) { left_.push_back(std::move(compute)); }

 private:
  std::vector<std::function<void()>> left_;
};

// While the result lives, backwards that this thread calls leave gradients of weights to `later`; none where it is
// null.
c10::DebugInfoGuard leave_weights_to(std::shared_ptr<WeightGradients> later);

// torch::linear(x, weight, bias); the bias may be undefined. Only the gradient of a weight that is a leaf of autograd's
// graph, without hooks of its own (register_hook), is left for later.
Tensor split_linear(const Tensor& x, const Tensor& weight, const Tensor& bias);

// The hook of a weight whose linear layers become split_linear.
class SplitWeight final : public ops::ParameterHook {
 public:
  explicit SplitWeight(const Tensor& weight) : weight_(weight) {}
  bool run(const ops::OperatorCall& call, std::size_t i) override;

 private:
  const gradient::WeakTensor weight_;  // which owns the hook
};

}  // namespace lockstep::parallel
