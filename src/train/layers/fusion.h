// Layers that are computed in one pass.
#pragma once

#include <functional>
#include <vector>

#include "lockstep/train/layers.h"

namespace lockstep::train {

// Computes `layers[i]` together with the layers after it that share one operator with it.
struct Fused {
  std::function<Tensor(const Tensor&)> forward;
  std::size_t layers = 1;
};

// `built` are the layers, built, in their order.
Fused fuse(const std::vector<Layer>& layers, const std::vector<BuiltLayer>& built, std::size_t i);

}  // namespace lockstep::train
