// The torch module of a layer with a weight and a bias.
#pragma once

#include <torch/nn/module.h>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/train/layers.h"

namespace lockstep::train {

struct ParameterModule : torch::nn::Module {
  // Registers `name` with the given sizes, filled by `initializer`; an undefined tensor when not `wanted`.
  Tensor make(const std::string& parameter_name, at::IntArrayRef sizes, const Initializer& initializer,
              bool wanted = true) {
    if (!wanted) return {};
    Tensor tensor = at::empty(sizes);
    initializer.fill(tensor);
    return register_parameter(parameter_name, tensor);
  }

  Tensor weight, bias;
};

inline void require_positive(const char* what, std::int64_t value) {
  if (value < 1) throw InvalidArgument(text(what, " is ", value, "; it must be at least 1"));
}

// Throws InvalidArgument unless the input has `dims` dimensions, batch included.
inline void require_dims(const char* layer, const Tensor& input, std::int64_t dims, const char* names) {
  if (input.dim() == dims) return;
  throw InvalidArgument(text(layer, ": the input has shape ", input.sizes(), "; it must be ", names));
}

}  // namespace lockstep::train
