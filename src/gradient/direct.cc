#include "gradient/direct.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "kernels/update.h"

namespace lockstep::gradient {
namespace {

bool is_finite(const at::Tensor& gradient) {
  const auto squares = [&]<class T>(T) {
    return kernels::update_kernels<T>().sum_of_squares(gradient.const_data_ptr<T>(),
                                                       static_cast<std::size_t>(gradient.numel()));
  };
  return std::isfinite(gradient.scalar_type() == at::kDouble ? squares(double()) : squares(float()));
}

// Gradients on a GPU are checked together, so that the host waits once.
bool are_finite(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> on_gpu;
  for (const auto& gradient : gradients) {
    if (!gradient.defined()) continue;
    if (!gradient.is_cpu()) {
      on_gpu.push_back(gradient);
    } else if (!is_finite(gradient)) {
      return false;
    }
  }
  if (on_gpu.empty()) return true;
  auto found = at::zeros({1}, on_gpu[0].options().dtype(at::kFloat));
  at::_amp_foreach_non_finite_check_and_unscale_(on_gpu, found, at::ones_like(found));
  return found.item<float>() == 0;
}

Ownership ownership_of(const ReplicatedParameters& parameters, Exchange exchange, int root) {
  const int replicas = parameters.replicas();
  if (exchange == Exchange::one_pass || replicas == 1) {
    return {ShardMap::even(parameters.trainable(), replicas), /*processes=*/1, Ownership::Writes::all_copies};
  }
  const bool in_tree = exchange == Exchange::hierarchical_copy;
  return {ShardMap::all_to(in_tree ? 0 : root, parameters.trainable(), replicas), /*processes=*/1,
          in_tree ? Ownership::Writes::first_copy : Ownership::Writes::all_copies};
}

}  // namespace

at::Tensor in_shape_of(const at::Tensor& parameter, const at::Tensor& flat) {
  if (!parameter.is_cpu()) return {};
  return at::from_blob(
      flat.data_ptr(), parameter.sizes(), [flat](void*) {}, flat.options());
}

at::Tensor placed_in(const at::Tensor& flat, const at::Tensor& gradient) {
  if (!gradient.defined()) return gradient;
  if (gradient.const_data_ptr() != flat.const_data_ptr()) {
    const at::NoGradGuard no_grad;
    flat.copy_(gradient.view({-1}));
  }
  return flat;
}

Direct::Direct(const ReplicatedParameters& parameters, Exchange exchange, int root)
    : Reduction(ownership_of(parameters, exchange, root), /*during_backward=*/false),
      parameters_(parameters),
      contributions_(static_cast<std::size_t>(parameters.replicas())) {
  for (auto& contribution : contributions_) {
    contribution.gradients.resize(parameters.slots().size());
    parts_.emplace_back(contribution.gradients);
  }
  if (exchange != Exchange::hierarchical_copy || parameters.replicas() == 1) return;
  tree_.emplace(parameters);
  parts_.assign(1, tree_->sums);
}

Sums Direct::finish(const Group& replicas, double weight, bool check_finite, Deadline deadline) {
  auto& mine = contributions_[static_cast<std::size_t>(replicas.rank())];
  mine.weight = weight;
  mine.finite = !check_finite || are_finite(mine.gradients);
  replicas.barrier(deadline);
  if (tree_) sum_up(replicas, deadline);
  Sums sums{.parts = parts_};
  for (const auto& contribution : contributions_) {
    sums.weight += contribution.weight;
    sums.finite = sums.finite && contribution.finite;
  }
  return sums;
}

void Direct::end_step(int replica, StepEnd /*end*/) {
  for (auto& gradient : contributions_[static_cast<std::size_t>(replica)].gradients) gradient.reset();
}

Direct::Tree::Tree(const ReplicatedParameters& parameters) : sums(parameters.slots().size()) {
  for (int replica = 0; replica < parameters.replicas(); ++replica) {
    floats.push_back(at::zeros({parameters.flat_numel(at::kFloat)}, at::kFloat));
    doubles.push_back(at::zeros({parameters.flat_numel(at::kDouble)}, at::kDouble));
    places.emplace_back();
    for (const auto& slot : parameters.slots()) {
      const auto& flat = slot.dtype == at::kDouble ? doubles.back() : floats.back();
      places.back().push_back(slot.trainable ? flat.narrow(0, slot.offset, slot.numel) : at::Tensor());
    }
  }
}

void Direct::sum_up(const Group& replicas, Deadline deadline) {
  const at::NoGradGuard no_grad;
  const auto rank = static_cast<std::size_t>(replicas.rank()), size = static_cast<std::size_t>(replicas.size());
  for (std::size_t slot = 0; slot < tree_->sums.size(); ++slot) {
    const auto& place = tree_->places[rank][slot];
    const auto& gradient = contributions_[rank].gradients[slot];
    if (!place.defined()) continue;
    if (gradient.defined()) {
      place.copy_(gradient.view({-1}));
    } else {
      place.zero_();
    }
  }
  for (std::size_t distance = 1; distance < size; distance *= 2) {
    replicas.barrier(deadline);
    if (rank % (2 * distance) != 0 || rank + distance >= size) continue;
    tree_->floats[rank].add_(tree_->floats[rank + distance]);
    tree_->doubles[rank].add_(tree_->doubles[rank + distance]);
  }
  for (std::size_t slot = 0; rank == 0 && slot < tree_->sums.size(); ++slot) {  // replica 0 alone reads them
    const bool any =
        std::ranges::any_of(contributions_, [&](const auto& one) { return one.gradients[slot].defined(); });
    tree_->sums[slot] = any ? tree_->places[0][slot] : at::Tensor();
  }
}

void Direct::publish(const Group& replicas, Deadline deadline) {
  if (!tree_) return;
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
