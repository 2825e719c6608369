// Helpers that the tests of TPUStrategy share.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

namespace lockstep {

// A strategy on as many devices of the plugin for CPUs.
inline TPUStrategy tpu(int replicas) {
  return TPUStrategy(
      TPUClusterResolver("", {.plugin = CPU_PLUGIN, .plugin_options = {{"cpu_device_count", std::int64_t{replicas}}}}));
}

// The process's first strategy for them comes before its first backward.
class MakesTpuFirst final : public testing::Environment {
  void SetUp() override { tpu(1); }
};
inline const auto* const makes_tpu_first = testing::AddGlobalTestEnvironment(new MakesTpuFirst);

// The module of examples/custom_module.cc without a bias that BatchNorm takes away: its gradient would be rounding
// alone, which Adam makes as large as any. Dropout draws other numbers than on other devices.
struct NormalizedImpl : torch::nn::Module {
  explicit NormalizedImpl(double dropped) : dropout(register_module("dropout", torch::nn::Dropout(dropped))) {}
  Tensor forward(const Tensor& x) { return output(dropout(torch::relu(norm(convolution(x))).flatten(1))); }
  torch::nn::Conv2d convolution =
      register_module("convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 6, 5).stride(2).bias(false)));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(6));
  torch::nn::Dropout dropout;
  torch::nn::Linear output = register_module("output", torch::nn::Linear(6 * 4 * 4, 10));
};
TORCH_MODULE(Normalized);

}  // namespace lockstep
