#include "train/staged_execution.h"

#include <ATen/ATen.h>

#include <array>

#include "train/model_impl.h"
#include "train/step_clock.h"

namespace lockstep::train {

// Metrics are updated as outputs of microbatches come.
ComputedStep StagedExecution::compute_gradients(ReplicaContext& replica, const Example& part, Tracker& into,
                                                StepTimes& spent) {
  Lap lap;
  const auto& split = *impl_.parameters->split();
  if (split.before_forward) split.before_forward();
  if (split.before_backward) split.before_backward(1);
  const double scale = impl_.gradients->updater().loss_scale().value();
  const AddedLosses none(AddedLosses::Use::refused);
  std::array<double, 2> sums{};  // the losses, and what divides them
  const auto loss_of = [&](const Tensor& computed, std::int64_t first, std::int64_t count) {
    const auto some = rows_of(part, first, count);
    const auto output = impl_.policy.outputs(computed);
    const auto loss = impl_.compiled->loss.terms(some.y, output, some.weight);
    require_gradient(loss.sum);
    sums[0] += loss.sum.item<double>();
    sums[1] += loss.divisor;
    if (impl_.topology.counts()) into.update(replica.local_replica_id(), some, output.detach());
    return loss.sum * scale;
  };
  stages_.forward_backward(part.x, loss_of);
  stages_.workers().sum(sums);
  lap.add_to(spent.backward);
  return {{}, at::scalar_tensor(sums[0], at::kDouble), sums[1], weight_of(replica, sums[1])};
}

void StagedExecution::compute_zeros(int /*replica*/, const Example& part, const LossOf& loss_of) {
  stages_.forward_backward(part.x, [&](const Tensor& output, std::int64_t first, std::int64_t count) {
    return loss_of(output, first, count) * 0;
  });
}

Tensor StagedExecution::forward(int /*replica*/, const Tensor& x) const { return stages_.forward(x); }

}  // namespace lockstep::train
