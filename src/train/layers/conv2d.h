// The spec of Conv2D, for the layers that are fused with it.
#pragma once

#include "train/layers/padding.h"
#include "train/layers/parameter_module.h"

namespace lockstep::train {

class Conv2DSpec final : public LayerSpec {
 public:
  Conv2DSpec(std::int64_t filters, Size2D kernel_size, Conv2DOptions options);
  std::string kind() const override { return "conv2d"; }
  BuiltLayer build(const Tensor& input) const override;

  const Window& window() const { return window_; }
  const Conv2DOptions& options() const { return options_; }

 private:
  std::int64_t filters_;
  Window window_;
  Conv2DOptions options_;
};

}  // namespace lockstep::train
