#include "gradient/one_pass.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

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

// Those on a GPU are checked together, for which the host waits once.
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

}  // namespace

at::Tensor in_shape_of(const at::Tensor& parameter, const at::Tensor& flat) {
  if (!parameter.is_cpu()) return {};
  return at::from_blob(
      flat.data_ptr(), parameter.sizes(), [flat](void*) {}, flat.options());
}

OnePass::OnePass(const ReplicatedParameters& parameters, int root)
    : parameters_(parameters), root_(root), contributions_(static_cast<std::size_t>(parameters.replicas())) {
  for (auto& contribution : contributions_) contribution.gradients.resize(parameters.slots().size());
}

ShardMap OnePass::shards() const {
  const int replicas = parameters_.replicas();
  return root_ < 0 ? ShardMap::even(parameters_.trainable(), replicas)
                   : ShardMap::all_to(root_, parameters_.trainable(), replicas);
}

void OnePass::on_ready(int replica, std::size_t slot, const at::Tensor& gradient) {
  contributions_[static_cast<std::size_t>(replica)].gradients[slot] = gradient;
}

void OnePass::finish(int replica, double weight, bool check_finite) {
  auto& mine = contributions_[static_cast<std::size_t>(replica)];
  mine.weight = weight;
  mine.finite = !check_finite || are_finite(mine.gradients);
}

GradientSync::Totals OnePass::totals() const {
  Totals totals;
  for (const auto& contribution : contributions_) {
    totals.weight += contribution.weight;
    totals.finite = totals.finite && contribution.finite;
  }
  return totals;
}

std::vector<const at::Tensor*> OnePass::sources(std::size_t slot) const {
  std::vector<const at::Tensor*> gradients;
  for (const auto& contribution : contributions_) {
    if (contribution.gradients[slot].defined()) gradients.push_back(&contribution.gradients[slot]);
  }
  return gradients;
}

void OnePass::forget(int replica) {
  for (auto& gradient : contributions_[static_cast<std::size_t>(replica)].gradients) gradient.reset();
}

}  // namespace lockstep::gradient
