// Tests which layers count as equal.
#include "parallel/layer_measurements.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/parallel/cut_stages.h"

namespace lockstep::parallel {
namespace {

LayerKinds kinds_of(const std::vector<PipelineStage>& layers, const at::Tensor& x) {
  const auto numbered = join_layers(layers, std::vector<int>(layers.size(), 1));
  const SplitLoss loss = [](const at::Tensor& y, const at::Tensor&, const Communicator&) { return y.mean(); };
  const PlanOptions options;
  return find_kinds({numbered, x, x, loss, options}, 1);
}

struct ConvolutionImpl : torch::nn::Module {
  explicit ConvolutionImpl(std::int64_t stride) {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 2, 3).stride(stride).padding(1)));
  }
  at::Tensor forward(const at::Tensor& x) { return conv(x); }

  torch::nn::Conv2d conv = nullptr;
};

TEST(LayerKinds, LayersWithOtherOutputsDiffer) {
  const auto convolution = [](std::int64_t stride) {
    return PipelineStage([stride] { return std::make_shared<ConvolutionImpl>(stride); });
  };
  const auto found = kinds_of(
      {convolution(1), convolution(1), convolution(1), convolution(2), convolution(1), convolution(1), convolution(1)},
      at::ones({4, 2, 8, 8}));
  // The first and the last one are alone; after the fourth, inputs are smaller.
  EXPECT_EQ(found.of_layers, (std::vector<std::size_t>{0, 1, 1, 2, 3, 3, 4}));
  EXPECT_EQ(found.kinds[3].sample.sizes(), (std::vector<std::int64_t>{1, 2, 4, 4}));
  EXPECT_EQ(found.kinds[1].parameter_bytes, 4.0 * (2 * 2 * 9 + 2));
}

}  // namespace
}  // namespace lockstep::parallel
