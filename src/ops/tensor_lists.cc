#include "ops/tensor_lists.h"

namespace lockstep::ops {

std::vector<at::Tensor> defined_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> defined;
  for (const auto& tensor : tensors)
    if (tensor.defined()) defined.push_back(tensor);
  return defined;
}

std::vector<std::int64_t> shapes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> shapes;
  for (const auto& tensor : tensors) {
    shapes.push_back(tensor.defined() ? static_cast<std::int64_t>(tensor.scalar_type()) : -1);
    if (!tensor.defined()) continue;
    shapes.push_back(tensor.dim());
    shapes.insert(shapes.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  return shapes;
}

}  // namespace lockstep::ops
