// The specs of MaxPooling2D and AveragePooling2D, for the layers that are fused with them.
#pragma once

#include "train/layers/padding.h"
#include "train/layers/parameter_module.h"

namespace lockstep::train {

class PoolingSpec final : public LayerSpec {
 public:
  using Pool = Tensor (*)(const Tensor&, const Window&, const Padding&);

  PoolingSpec(std::string kind, Pool pool, Size2D size, const Pooling2DOptions& options);
  std::string kind() const override { return kind_; }
  BuiltLayer build(const Tensor& input) const override;

  const Window& window() const { return window_; }
  const std::string& padding() const { return padding_; }

 private:
  std::string kind_;
  Pool pool_;
  Window window_;
  std::string padding_;
};

}  // namespace lockstep::train
