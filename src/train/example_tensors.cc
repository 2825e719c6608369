#include "train/example_tensors.h"

#include "ops/tensor_lists.h"

namespace lockstep::train {

Shapes shapes_of(const Example& batch) {
  const auto none = first_of(batch, 0);
  return ops::shapes_of({none.x, none.y, none.weight});
}

std::vector<Tensor> defined_of(const Example& example) {
  return ops::defined_of({example.x, example.y, example.weight});
}

Example first_of(const Example& batch, std::int64_t count) {
  const auto some = [&](const Tensor& tensor) { return tensor.defined() ? tensor.narrow(0, 0, count) : tensor; };
  return {some(batch.x), some(batch.y), some(batch.weight)};
}

}  // namespace lockstep::train
