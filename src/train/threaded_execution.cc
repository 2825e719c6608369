#include "train/threaded_execution.h"

#include <ATen/ATen.h>

#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "ops/tensors.h"
#include "train/model_impl.h"
#include "train/shapes.h"
#include "train/tracker.h"

namespace lockstep::train {

namespace {

Tensor own_copy(const Tensor& tensor, c10::Device device) {
  return tensor.defined() ? tensor.detach().to(device, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true)
                          : tensor;
}

// Copies from any memory, also a host's that is not pinned: CUDA has read that when the call returns.
void overwrite(const Tensor& own, const Tensor& value) {
  const at::NoGradGuard no_grad;
  if (own.defined()) own.copy_(value, /*non_blocking=*/true);
}

}  // namespace

bool RecordedStep::serves(const Example& part, c10::Device device,
                          const std::function<ComputedStep(const Example&)>& compute) {
  if (failed_ || part.weight.defined()) return false;
  auto shape = ops::shapes_of({part.x, part.y});  // weights would make the loss's divisor a part of the recording
  if (shape != shape_) {
    // An epoch's last, smaller batch is computed without the recording, which is kept for the full batches.
    if (work_ != nullptr) return false;
    shape_ = std::move(shape);
    seen_ = 0;
  }
  if (work_ == nullptr && ++seen_ > kStepsBefore) record(part, device, compute);
  return work_ != nullptr;
}

void RecordedStep::record(const Example& part, c10::Device device,
                          const std::function<ComputedStep(const Example&)>& compute) {
  input_ = {own_copy(part.x, device), own_copy(part.y, device)};
  try {
    work_ = ops::work_recorder()(device, [&] { result_ = compute(input_); });
  } catch (const c10::Error& error) {
    give_up(error.what_without_backtrace());
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}

void RecordedStep::give_up(const char* reason) {
  log_warning(text("jit_compile: the step cannot be recorded and runs as without it: ", reason));
  failed_ = true;
}

ComputedStep RecordedStep::play(const Example& part) {
  overwrite(input_.x, part.x);
  overwrite(input_.y, part.y);
  work_->replay();
  return result_;
}

// --- the step that fit makes, as each replica sees it

namespace {

void backward_from(const Tensor& loss, double gradient, const Example& part) {
  try {
    loss.backward(at::scalar_tensor(gradient, loss.options().requires_grad(false)));
  } catch (const c10::Error& error) {
    throw InvalidArgument(
        text("the backward pass failed for ", batch_named(part), ": ", error.what_without_backtrace()));
  }
}

}  // namespace

std::vector<PerReplica<StepResult>> ThreadedExecution::train(std::vector<Parts>& batches, Tracker& tracker,
                                                             std::unique_ptr<Prepared> /*prepared*/,
                                                             const std::function<void()>& /*meanwhile*/) {
  std::vector<PerReplica<StepResult>> all;
  for (auto& batch : batches) {
    Lap lap;
    std::vector<StepResult> results(static_cast<std::size_t>(batch.size()));
    unwrap(impl_.strategy).run([&](ReplicaContext& replica) {
      const int id = replica.local_replica_id();
      results[static_cast<std::size_t>(id)] = train_step(replica, batch[id], tracker);
    });
    all.emplace_back(std::move(results));
    ++impl_.state.steps;
    ++impl_.times.steps;
    lap.add_to(impl_.times.total);
  }
  return all;
}

// Returns the replica's weight: the sum of gradients is divided by the sum of weights.
double ThreadedExecution::weight_of(const ReplicaContext& replica, double divisor) const {
  return impl_.compiled->loss.reduction() == Reduction::sum ? impl_.lead->weight_of_sum(replica) : divisor;
}

StepResult ThreadedExecution::train_step(ReplicaContext& replica, const internal::Part& unread, Tracker& into) {
  const int id = replica.local_replica_id();
  StepTimes unused;
  StepTimes& spent = id == 0 ? impl_.times : unused;
  Lap lap;
  const auto there = unread.row.materialize();
  lap.add_to(spent.input);
  replica.seed_random(mix(impl_.state.seed, static_cast<std::uint64_t>(impl_.state.steps),
                          static_cast<std::uint64_t>(impl_.number_of(replica))));
  impl_.gradients->drop_gradients(id);  // left by a step that failed
  const bool idle = there.size() == 0;
  if (idle && !impl_.topology.computes_without_examples) {
    // No examples: takes part in the others' update. Where each rank has data of its own, each has a replica 0, and a
    // rank without examples has weight 0.
    const double weight = impl_.topology.has_own_data() ? 0 : weight_of(replica, 0);
    impl_.gradients->apply(replica.local_group(), weight, replica.deadline());
    return {};
  }
  const at::AutoGradMode with_gradients(true);
  if (impl_.compiled->jit_compile && ops::work_recorder() && impl_.gradients->can_be_recorded()) {
    const auto compute = [&](const Example& batch) { return enqueue_step(replica, batch); };
    if (recorded_.serves(there, unread.device, compute)) return play_step(replica, there, into);
    impl_.gradients->drop_gradients(id);  // left by a recording that failed
  }
  check_loss();
  const auto part = own_part(unread.moved(there));
  lap.add_to(spent.input);
  if (!idle && impl_.topology.computes_without_examples && !example_.x.defined()) example_ = example_like(part);
  const auto computed = idle ? compute_no_gradients(replica, part) : compute_gradients(replica, part, into, spent);
  lap = {};
  const bool counted = impl_.topology.counts() && !idle;
  // Metrics come before anything has changed: a metric may throw.
  if (counted && computed.outputs.defined()) into.update(id, part, computed.outputs);
  lap.add_to(spent.metrics);
  impl_.gradients->apply(replica.local_group(), computed.weight, replica.deadline());
  if (!idle) impl_.parameters->count_examples(id, static_cast<double>(part.size()));
  // At the end, because reading the loss waits for a GPU, which has the update to compute by now.
  StepResult result;
  if (counted)
    result = {computed.loss_sum.item<double>(), computed.divisor, impl_.topology.counts_examples() ? part.size() : 0};
  lap.add_to(spent.reduce_and_update);
  return result;
}

ComputedStep ThreadedExecution::compute_gradients(ReplicaContext& replica, const Example& part, Tracker& /*tracker*/,
                                                  StepTimes& spent) {
  Lap lap;
  const AddedLosses added(AddedLosses::Use::with_gradients);
  const auto outputs = outputs_of(replica.local_replica_id(), part);
  const auto loss = added.add_to(impl_.compiled->loss.terms(part.y, outputs, part.weight), impl_.compiled->loss);
  lap.add_to(spent.forward);
  require_gradient(loss.sum);
  // With one replica the division is part of the first gradient; else the sum of the weights is not known yet.
  const double weight = weight_of(replica, loss.divisor);
  const auto& split = impl_.parameters->split();
  const bool is_summed = split && split->summed_over && split->summed_over->size() > 1;
  const bool divided =
      replica.num_replicas_in_sync() == 1 && impl_.gradients->ranks().size() == 1 && !is_summed && weight > 0;
  impl_.gradients->expect_one_backward(replica.local_replica_id());
  if (split && split->before_backward) split->before_backward(1);
  backward_from(loss.sum, impl_.gradients->updater().loss_scale().value() / (divided ? weight : 1), part);
  lap.add_to(spent.backward);
  return {outputs.detach(), loss.sum.detach(), loss.divisor, divided ? 1 : weight};
}

// Takes part where all compute in every step, with examples of zeros whose gradients have weight 0.
ComputedStep ThreadedExecution::compute_no_gradients(ReplicaContext& replica, const Example& empty) {
  const auto none = example_of_none(empty);
  const auto& split = *impl_.parameters->split();
  const int id = replica.local_replica_id();
  std::vector<Tensor> buffers;  // which such examples must not change
  for (std::size_t i = 0; i < impl_.parameters->buffer_names().size(); ++i)
    buffers.push_back(impl_.parameters->buffer(id, i).clone());
  const auto loss_of = [&](const Tensor& output, std::int64_t first, std::int64_t count) {
    const auto some = internal::rows_of(none, first, count);
    const auto loss = impl_.compiled->loss.terms(some.y, impl_.policy.outputs(output), some.weight);
    require_gradient(loss.sum);
    return loss.sum;
  };
  if (split.before_forward) split.before_forward();
  if (split.before_backward) split.before_backward(0);
  compute_zeros(id, none, loss_of);
  for (std::size_t i = 0; i < buffers.size(); ++i) impl_.parameters->assign_buffer_of(id, i, buffers[i]);
  if (split.before_backward) split.before_backward(1);  // of loops of the program's own
  const bool others_need_them = split.sums_in_backward() || computes_with_no_tokens();
  if (!others_need_them) impl_.gradients->drop_gradients(id);
  return {{}, {}, 0, weight_of(replica, 0)};
}

void ThreadedExecution::compute_zeros(int replica, const Example& part, const LossOf& loss_of) {
  backward_from(loss_of(outputs_of(replica, part), 0, part.size()), 0, part);
}

Tensor ThreadedExecution::outputs_of_any(int replica, const Example& part) const {
  if (part.size() > 0) return outputs_of(replica, part);
  if (impl_.topology.computes_without_examples) outputs_of(replica, example_of_none(part));
  return {};
}

// Returns an example like those that this worker has had, where the worker has none now.
Example ThreadedExecution::example_of_none(const Example& empty) const {
  if (empty.x.defined()) example_ = example_like(empty);
  if (example_.x.defined()) return computes_with_no_tokens() ? internal::rows_of(example_, 0, 0) : example_;
  throw InvalidArgument(
      "a worker has had no example yet, and cannot take part in computing those of others: give each some of the first "
      "batch");
}

PerReplica<StepResult> ThreadedExecution::evaluate(Parts& batch, Tracker& tracker) {
  const auto evaluate_part = [&](ReplicaContext& replica, const internal::Part& unread) -> StepResult {
    const auto part = own_part(unread.read());
    const AddedLosses added(losses_in_evaluation());
    const auto outputs = outputs_of_any(replica.local_replica_id(), part);
    if (!outputs.defined() || !impl_.topology.counts()) return {};
    const auto& compiled = impl_.compiled->loss;
    const auto loss = added.add_to(compiled.terms(part.y, outputs, part.weight), compiled);
    tracker.update(replica.local_replica_id(), part, outputs);
    return {loss.sum.item<double>(), loss.divisor, impl_.topology.counts_examples() ? part.size() : 0};
  };
  return impl_.strategy.run(evaluate_part, batch);
}

std::vector<Tensor> ThreadedExecution::predict(Parts& batch) {
  const auto predict_part = [&](ReplicaContext& replica, const internal::Part& unread) {
    const auto part = own_part(unread.read());
    const auto rows = outputs_of_any(replica.local_replica_id(), part);
    const auto all = whole(rows);
    return impl_.topology.counts() && impl_.topology.counts_examples() ? all : Tensor();
  };
  const auto parts = impl_.strategy.run(predict_part, batch);
  return {parts.begin(), parts.end()};
}

ComputedStep ThreadedExecution::enqueue_step(ReplicaContext& replica, const Example& batch) {
  StepTimes unused;
  const auto computed = compute_gradients(replica, batch, *impl_.state.tracker, unused);
  impl_.gradients->update_recorded(replica.local_group(), computed.weight, replica.deadline());
  return computed;
}

StepResult ThreadedExecution::play_step(ReplicaContext& replica, const Example& part, Tracker& into) {
  impl_.gradients->updater().begin_step();
  const auto result = recorded_.play(part);
  impl_.gradients->updater().count_step();
  into.update(replica.local_replica_id(), recorded_.input(), result.outputs);
  impl_.parameters->count_examples(replica.local_replica_id(), static_cast<double>(part.size()));
  return {result.loss_sum.item<double>(), result.divisor, part.size()};
}

}  // namespace lockstep::train
