// For tests: a small expert.
#pragma once

#include <torch/nn/modules/linear.h>

namespace lockstep::parallel {

inline constexpr std::int64_t kExpertWidth = 6;

struct ExpertImpl : torch::nn::Module {
  ExpertImpl()
      : up(register_module("up", torch::nn::Linear(kExpertWidth, 10))),
        down(register_module("down", torch::nn::Linear(10, kExpertWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return down(torch::tanh(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Expert);

}  // namespace lockstep::parallel
