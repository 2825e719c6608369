#include "parallel/mesh_execution.h"

#include <ATen/ATen.h>

#include <array>
#include <utility>

#include "base/log.h"
#include "lockstep/base/error.h"
#include "train/model_impl.h"
#include "train/tracker.h"

namespace lockstep::parallel {

using train::AddedLosses;
using train::ComputedStep;
using train::Tracker;

void MeshExecution::check_loss() const {
  if (mesh_.topology().positions.size() > 1 && impl_.compiled->loss.reduction() == Reduction::sum)
    throw InvalidArgument("fit: a loss with Reduction::sum is not for sequences that are divided; take a mean");
}

ComputedStep MeshExecution::compute_gradients(ReplicaContext& replica, const Example& part, Tracker& tracker,
                                              StepTimes& spent) {
  const auto context = mesh_.use_context();
  const auto computed = ThreadedExecution::compute_gradients(replica, part, tracker, spent);
  warn_without_attention(context.get());
  return computed;
}

void MeshExecution::warn_without_attention(const ContextParallel* context) {
  if (context == nullptr || context->attentions() > 0 || std::exchange(warned_of_context_, true)) return;
  log_warning(
      "fit: sequences are divided, but the model called no torch::scaled_dot_product_attention: each rank's part of a "
      "sequence sees itself alone");
}

void MeshExecution::compute_zeros(int replica, const Example& part, const LossOf& loss_of) {
  const auto context = mesh_.use_context();
  ThreadedExecution::compute_zeros(replica, part, loss_of);
}

Tensor MeshExecution::outputs_of_any(int replica, const Example& part) const {
  const auto context = mesh_.use_context();
  return ThreadedExecution::outputs_of_any(replica, part);
}

Example MeshExecution::own_part(const Example& part) const {
  return part.x.defined() ? mesh_.own_positions(part, impl_.parameters->split()->positions) : part;
}

std::shared_ptr<ReplicatedParameters> StagedExecution::make_parameters(const Example& sample) {
  const auto& strategy = unwrap(impl_.strategy);
  ops::ReplicaRandom random;
  random.seed(std::stoull(impl_.topology.all.broadcast(std::to_string(impl_.state.first_seed))));
  const ops::ReplicaRandom::Use use(random);
  const auto device = strategy.replicas().device(0);
  const at::OptionalDeviceGuard on_device(device);
  const auto in_policy = [policy = impl_.policy, type = device.type()](const std::function<Tensor()>& compute) {
    const train::ComputePolicy::Scope scope(policy, type);
    return compute();
  };
  const auto make = [&] {
    auto made = impl_.definition.make_layers(sample);
    for (auto& layer : made.layers) layer = layer.with_forward(in_policy);
    return made;
  };
  stages_ = std::make_unique<PipelineModel>(mesh_, make, sample.x, device);
  return std::make_shared<ReplicatedParameters>(stages_->module(), stages_->split(), strategy.placement(),
                                                impl_.topology);
}

// Metrics are updated as outputs of microbatches come.
ComputedStep StagedExecution::compute_gradients(ReplicaContext& replica, const Example& part, Tracker& into,
                                                StepTimes& spent) {
  const auto context = mesh_.use_context();
  train::Lap lap;
  const auto& split = *impl_.parameters->split();
  if (split.before_forward) split.before_forward();
  if (split.before_backward) split.before_backward(1);
  const double scale = impl_.gradients->updater().loss_scale().value();
  const AddedLosses none(AddedLosses::Use::refused);
  std::array<double, 2> sums{};  // the losses, and what divides them
  std::vector<Tensor> losses;    // on their device, so that the host waits for it once
  const auto loss_of = [&](const Tensor& computed, std::int64_t first, std::int64_t count) {
    const auto some = internal::rows_of(part, first, count);
    const auto output = impl_.policy.outputs(computed);
    const auto loss = impl_.compiled->loss.terms(some.y, output, some.weight);
    require_gradient(loss.sum);
    losses.push_back(loss.sum.detach().to(at::kDouble));
    sums[1] += loss.divisor;
    if (impl_.topology.counts()) into.update(replica.local_replica_id(), some, output.detach());
    return loss.sum * scale;
  };
  stages_->forward_backward(part.x, loss_of);
  if (!losses.empty()) sums[0] = at::stack(losses).sum().item<double>();
  stages_->workers().sum(sums);
  warn_without_attention(context.get());
  lap.add_to(spent.backward);
  return {{}, at::scalar_tensor(sums[0], at::kDouble), sums[1], weight_of(replica, sums[1])};
}

void StagedExecution::compute_zeros(int /*replica*/, const Example& part, const LossOf& loss_of) {
  const auto context = mesh_.use_context();
  stages_->forward_backward(part.x, [&](const Tensor& output, std::int64_t first, std::int64_t count) {
    return loss_of(output, first, count) * 0;
  });
}

Tensor StagedExecution::forward(int /*replica*/, const Tensor& x) const { return stages_->forward(x); }

}  // namespace lockstep::parallel
