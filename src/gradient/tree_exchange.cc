// The hierarchical copy of tf.distribute.HierarchicalCopyAllReduce: sums go pairwise up a binomial tree to replica 0
// and the new values come down the same tree. In each round the distance between partners doubles:
//
//   round 1: 0 <- 1   2 <- 3   4 <- 5
//   round 2: 0 <- 2   4
//   round 3: 0 <- 4
#include <ATen/core/grad_mode.h>

#include "gradient/update_engine.h"

namespace lockstep {

void UpdateEngine::sum_up_tree(const Group& group, Deadline deadline) {
  const at::NoGradGuard no_grad;
  const auto rank = static_cast<std::size_t>(group.rank());
  const auto size = static_cast<std::size_t>(group.size());
  for (std::size_t i = 0; i < parameters_->slots().size(); ++i) {
    const auto& slot = parameters_->slots()[i];
    if (!slot.trainable) continue;
    auto part = (slot.dtype == at::kDouble ? tree_double_ : tree_float_)[rank].narrow(0, slot.offset, slot.numel);
    const auto& gradient = contributions_[rank].gradients[i];
    if (gradient.defined()) {
      part.copy_(gradient.view({-1}));
    } else {
      part.zero_();
    }
  }
  for (std::size_t distance = 1; distance < size; distance *= 2) {
    group.barrier(deadline);
    if (rank % (2 * distance) != 0 || rank + distance >= size) continue;
    tree_float_[rank].add_(tree_float_[rank + distance]);
    tree_double_[rank].add_(tree_double_[rank + distance]);
  }
}

void UpdateEngine::copy_down_tree(const Group& group, Deadline deadline) {
  const at::NoGradGuard no_grad;
  const auto rank = static_cast<std::size_t>(group.rank());
  const auto size = static_cast<std::size_t>(group.size());
  std::size_t distance = 1;
  while (distance * 2 < size) distance *= 2;
  for (; distance > 0; distance /= 2) {
    group.barrier(deadline);
    if (parameters_->copies() == 1 || rank % (2 * distance) != distance) continue;
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      parameters_->flat(static_cast<int>(rank), dtype)
          .copy_(parameters_->flat(static_cast<int>(rank - distance), dtype));
    }
  }
}

}  // namespace lockstep
