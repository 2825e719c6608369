// Lists of tensors of which some may be undefined.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace lockstep::ops {

std::vector<at::Tensor> defined_of(const std::vector<at::Tensor>& tensors);

// Sizes and dtype of each, by which lists are compared: equal where the tensors are alike.
std::vector<std::int64_t> shapes_of(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep::ops
