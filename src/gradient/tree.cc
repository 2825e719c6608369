#include "gradient/tree.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

namespace lockstep::gradient {

Tree::Tree(const ReplicatedParameters& parameters) : OnePass(parameters, /*root=*/0) {
  for (int replica = 0; replica < parameters.replicas(); ++replica) {
    float_.push_back(at::zeros({parameters.flat_numel(at::kFloat)}, at::kFloat));
    double_.push_back(at::zeros({parameters.flat_numel(at::kDouble)}, at::kDouble));
    parts_.emplace_back();
    for (const auto& slot : parameters.slots()) {
      const auto& flat = slot.dtype == at::kDouble ? double_.back() : float_.back();
      parts_.back().push_back(slot.trainable ? flat.narrow(0, slot.offset, slot.numel) : at::Tensor());
    }
  }
}

void Tree::wait(const Group& replicas, Deadline deadline) {
  const at::NoGradGuard no_grad;
  const auto rank = static_cast<std::size_t>(replicas.rank());
  const auto size = static_cast<std::size_t>(replicas.size());
  for (std::size_t i = 0; i < parts_[rank].size(); ++i) {
    const auto& part = parts_[rank][i];
    const auto& gradient = of(replicas.rank()).gradients[i];
    if (!part.defined()) continue;
    if (gradient.defined()) {
      part.copy_(gradient.view({-1}));
    } else {
      part.zero_();
    }
  }
  for (std::size_t distance = 1; distance < size; distance *= 2) {
    replicas.barrier(deadline);
    if (rank % (2 * distance) != 0 || rank + distance >= size) continue;
    float_[rank].add_(float_[rank + distance]);
    double_[rank].add_(double_[rank + distance]);
  }
}

std::vector<const at::Tensor*> Tree::sources(std::size_t slot) const {
  if (OnePass::sources(slot).empty()) return {};
  return {&parts_[0][slot]};
}

void Tree::publish(const Group& replicas, Deadline deadline) {
  const at::NoGradGuard no_grad;
  const int rank = replicas.rank(), size = replicas.size();
  int distance = 1;
  while (distance * 2 < size) distance *= 2;
  for (; distance > 0; distance /= 2) {
    replicas.barrier(deadline);
    if (parameters_.copies() == 1 || rank % (2 * distance) != distance) continue;
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      parameters_.flat(rank, dtype).copy_(parameters_.flat(rank - distance, dtype));
    }
  }
}

}  // namespace lockstep::gradient
