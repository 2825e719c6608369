// The step that fit makes, as each replica sees it.
#include <ATen/ATen.h>

#include <array>
#include <chrono>

#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "train/added_losses.h"
#include "train/model_impl.h"
#include "train/shapes.h"

namespace lockstep {
namespace {

// Adds the time since it was made, or since the last call, to one of StepTimes' sums.
class Lap {
 public:
  void add_to(double& seconds) {
    const auto now = std::chrono::steady_clock::now();
    seconds += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// A replica's weight: the sum of gradients is divided by the sum of weights. For a loss that is a sum the weight is 1
// on replica 0, with or without examples, and 0 on the others. With servers each part of a step has its share of that
// 1. Servers do not count a part without weight, and may drop spare parts.
double weight_of(const ModelImpl& model, const ReplicaContext& replica, double divisor) {
  if (model.compiled->loss.reduction() != Reduction::sum) return divisor;
  if (model.servers() != nullptr)
    return replica.local_replica_id() == 0 ? 1.0 / static_cast<double>(model.servers()->mode().parts) : 0;
  return model.number_of(replica) == 0 ? 1 : 0;
}

std::string batch_named(const Example& part) {
  return text("a batch of shape ", part.x.sizes(), " and dtype ", part.x.scalar_type());
}

Example rows_of(const Example& part, std::int64_t first, std::int64_t count) {
  const auto some = [&](const Tensor& tensor) { return tensor.defined() ? tensor.narrow(0, first, count) : Tensor(); };
  return {some(part.x), some(part.y), some(part.weight)};
}

void backward_from(const Tensor& loss, double gradient, const Example& part) {
  try {
    loss.backward(at::scalar_tensor(gradient, loss.options().requires_grad(false)));
  } catch (const c10::Error& error) {
    throw InvalidArgument(
        text("the backward pass failed for ", batch_named(part), ": ", error.what_without_backtrace()));
  }
}

}  // namespace

void ModelImpl::require_gradient(const Tensor& loss) {
  if (loss.requires_grad()) return;
  throw InvalidArgument(
      "the loss depends on no trainable parameter; are all frozen, or does forward detach its result?");
}

Tensor ModelImpl::outputs_of(ReplicaContext& replica, const Example& part) const {
  // Some layers would take an example for a batch. A module of the user's own may take both.
  if (!layers.empty() && part.x.dim() + 1 == static_cast<std::int64_t>(built_for.size())) {
    throw InvalidArgument(text("the model cannot take ", batch_named(part),
                               ": it was built for batches of shape [batch, ",
                               join(at::IntArrayRef(built_for).slice(1)), "]; call batch() on the data set first"));
  }
  try {
    const train::ComputePolicy::Scope scope(policy, part.x.device().type());
    if (const auto& split = parameters->split(); split && split->before_forward) split->before_forward();
    const int id = ops::current_trace() != nullptr ? 0 : replica.local_replica_id();
    return policy.outputs(stages != nullptr ? stages->forward(part.x) : forward(parameters->module(id), part.x));
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    const bool one_value = what.find("Expected more than 1 value per channel") != std::string::npos;
    throw InvalidArgument(text("the model cannot take ", batch_named(part), ": ", what,
                               parameters->is_split() ? ". Where a plan divides layers, an output that stays divided "
                                                        "must go to a RowwiseParallel layer, or be whole: "
                                                        "ColwiseParallel{.output = Replicate()}"
                                                      : "",
                               one_value
                                   ? ". Batch normalization needs two examples on each replica: the last batch of "
                                     "the data set leaves one; use batch(size, {.drop_remainder = true}), another "
                                     "batch size, or lockstep::BatchNormalization"
                                   : ""));
  }
}

Tensor ModelImpl::outputs_of_any(ReplicaContext& replica, const Example& part) const {
  if (part.size() > 0) return outputs_of(replica, part);
  if (topology.computes_without_examples) outputs_of(replica, example_of_none(part));
  return {};
}

// With the shapes of the examples that this worker has had, where it has none now.
Example ModelImpl::example_of_none(const Example& empty) const {
  if (empty.x.defined()) example = train::example_like(empty);
  if (example.x.defined()) return mesh() != nullptr && mesh()->has_experts() ? rows_of(example, 0, 0) : example;
  throw InvalidArgument(
      "a worker has had no example yet, and cannot take part in computing those of others: give each some of the first "
      "batch");
}

int ModelImpl::number_of(const ReplicaContext& replica) const {
  const auto all = replicas();
  const int number = (all.workers.rank() + part_of_step) * all.count() + replica.local_replica_id();
  const auto& positions = topology.positions;  // which have other tokens
  return number * positions.size() + positions.rank();
}

train::StepResult ModelImpl::train_step(ReplicaContext& replica, const internal::Part& unread, train::Tracker& into) {
  const int id = replica.local_replica_id();
  StepTimes unused;
  StepTimes& spent = id == 0 ? times : unused;
  Lap lap;
  const auto there = unread.row.materialize();
  lap.add_to(spent.input);
  replica.seed_random(mix(seed, static_cast<std::uint64_t>(steps), static_cast<std::uint64_t>(number_of(replica))));
  gradients->drop_gradients(id);  // left by a step that failed
  const bool idle = there.size() == 0;
  if (idle && !topology.computes_without_examples) {
    // No examples: takes part in the others' update. Where each rank has data of its own, each has a replica 0, and a
    // rank without examples has weight 0.
    const double weight = topology.has_own_data() ? 0 : weight_of(*this, replica, 0);
    gradients->apply(replica.local_group(), weight, replica.deadline());
    return {};
  }
  const at::AutoGradMode with_gradients(true);
  if (compiled->jit_compile && ops::work_recorder() && gradients->can_be_recorded()) {
    const auto compute = [&](const Example& batch) { return enqueue_step(replica, batch); };
    if (recorded.serves(there, unread.device, compute)) return play_step(replica, there, into);
    gradients->drop_gradients(id);  // left by a recording that failed
  }
  const auto part = own_positions(unread.moved(there));
  const auto in_context = use_context();
  if (in_context && compiled->loss.reduction() == Reduction::sum)
    throw InvalidArgument("fit: a loss with Reduction::sum is not for sequences that are divided; take a mean");
  lap.add_to(spent.input);
  if (!idle && topology.computes_without_examples && !example.x.defined()) example = train::example_like(part);
  const auto computed = idle                ? compute_no_gradients(replica, part)
                        : stages != nullptr ? compute_in_stages(replica, part, into, spent)
                                            : compute_gradients(replica, part, spent);
  lap = {};
  if (in_context && !idle && in_context->attentions() == 0 && !std::exchange(warned_of_context, true)) {
    log_warning(
        "fit: sequences are divided, but the model called no torch::scaled_dot_product_attention: each rank's part of "
        "a "
        "sequence sees itself alone");
  }
  const bool counted = topology.counts() && !idle;
  // Before anything has changed: a metric may throw.
  if (counted && stages == nullptr) into.update(id, part, computed.outputs);
  lap.add_to(spent.metrics);
  gradients->apply(replica.local_group(), computed.weight, replica.deadline());
  if (!idle) parameters->count_examples(id, static_cast<double>(part.size()));
  // At the end, because reading the loss waits for a GPU, which has the update to compute by now.
  train::StepResult result;
  if (counted)
    result = {computed.loss_sum.item<double>(), computed.divisor, topology.counts_examples() ? part.size() : 0};
  lap.add_to(spent.reduce_and_update);
  return result;
}

train::ComputedStep ModelImpl::compute_gradients(ReplicaContext& replica, const Example& part, StepTimes& spent) {
  Lap lap;
  const train::AddedLosses added(train::AddedLosses::Use::with_gradients);
  const auto outputs = outputs_of(replica, part);
  const auto loss = added.add_to(compiled->loss.terms(part.y, outputs, part.weight), compiled->loss);
  lap.add_to(spent.forward);
  require_gradient(loss.sum);
  // With one replica the division is part of the first gradient; else the sum of the weights is not known yet.
  const double weight = weight_of(*this, replica, loss.divisor);
  const auto& split = parameters->split();
  const bool is_summed = split && split->summed_over && split->summed_over->size() > 1;
  const bool divided =
      replica.num_replicas_in_sync() == 1 && gradients->ranks().size() == 1 && !is_summed && weight > 0;
  gradients->expect_one_backward(replica.local_replica_id());
  if (split && split->before_backward) split->before_backward(1);
  backward_from(loss.sum, gradients->updater().loss_scale().value() / (divided ? weight : 1), part);
  lap.add_to(spent.backward);
  return {outputs.detach(), loss.sum.detach(), loss.divisor, divided ? 1 : weight};
}

// The same of a model that is cut into stages; updates the metrics too, as outputs of microbatches come.
train::ComputedStep ModelImpl::compute_in_stages(ReplicaContext& replica, const Example& part, train::Tracker& into,
                                                 StepTimes& spent) {
  Lap lap;
  const auto& split = *parameters->split();
  if (split.before_forward) split.before_forward();
  if (split.before_backward) split.before_backward(1);
  const double scale = gradients->updater().loss_scale().value();
  const train::AddedLosses none(train::AddedLosses::Use::refused);
  std::array<double, 2> sums{};  // of losses and of what divides them
  const auto loss_of = [&](const Tensor& computed, std::int64_t first, std::int64_t count) {
    const auto some = rows_of(part, first, count);
    const auto output = policy.outputs(computed);
    const auto loss = compiled->loss.terms(some.y, output, some.weight);
    require_gradient(loss.sum);
    sums[0] += loss.sum.item<double>();
    sums[1] += loss.divisor;
    if (topology.counts()) into.update(replica.local_replica_id(), some, output.detach());
    return loss.sum * scale;
  };
  stages->forward_backward(part.x, loss_of);
  stages->workers().sum(sums);
  lap.add_to(spent.backward);
  return {{}, at::scalar_tensor(sums[0], at::kDouble), sums[1], weight_of(*this, replica, sums[1])};
}

// Where all compute in every step: takes part, with examples of zeros whose gradients have weight 0.
train::ComputedStep ModelImpl::compute_no_gradients(ReplicaContext& replica, const Example& empty) {
  const auto none = example_of_none(empty);
  const auto& split = *parameters->split();
  const int id = replica.local_replica_id();
  std::vector<Tensor> buffers;  // which such examples must not change
  for (std::size_t i = 0; i < parameters->buffer_names().size(); ++i)
    buffers.push_back(parameters->buffer(id, i).clone());
  const auto loss_of = [&](const Tensor& output, std::int64_t first, std::int64_t count) {
    const auto some = rows_of(none, first, count);
    const auto loss = compiled->loss.terms(some.y, policy.outputs(output), some.weight);
    require_gradient(loss.sum);
    return loss.sum;
  };
  if (split.before_forward) split.before_forward();
  if (split.before_backward) split.before_backward(0);
  if (stages != nullptr) {
    stages->forward_backward(none.x, [&](const Tensor& output, std::int64_t first, std::int64_t count) {
      return loss_of(output, first, count) * 0;
    });
  } else {
    backward_from(loss_of(outputs_of(replica, none), 0, none.size()), 0, none);
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) parameters->assign_buffer_of(id, i, buffers[i]);
  if (split.before_backward) split.before_backward(1);  // of loops of the program's own
  const bool others_need_them = split.sums_in_backward() || mesh()->has_experts();
  if (!others_need_them) gradients->drop_gradients(id);
  return {{}, {}, 0, weight_of(*this, replica, 0)};
}

train::ComputedStep ModelImpl::enqueue_step(ReplicaContext& replica, const Example& batch) {
  StepTimes unused;
  const auto computed = compute_gradients(replica, batch, unused);
  gradients->update_recorded(replica.local_group(), computed.weight, replica.deadline());
  return computed;
}

train::StepResult ModelImpl::play_step(ReplicaContext& replica, const Example& part, train::Tracker& into) {
  gradients->updater().begin_step();
  const auto result = recorded.play(part);
  gradients->updater().count_step();
  into.update(replica.local_replica_id(), recorded.input(), result.outputs);
  parameters->count_examples(replica.local_replica_id(), static_cast<double>(part.size()));
  return {result.loss_sum.item<double>(), result.divisor, part.size()};
}

std::vector<PerReplica<train::StepResult>> ModelImpl::train_batches(
    std::vector<PerReplica<internal::Part>>& batches, train::Tracker& into,
    std::optional<train::CompiledModel::Prepared> prepared, const std::function<void()>& meanwhile) {
  std::vector<PerReplica<train::StepResult>> results;
  if (!programs) {
    for (auto& batch : batches) results.push_back(train_batch(batch, into));
    return results;
  }
  Lap lap;
  if (!prepared) prepared = programs->prepare(batches);
  results = programs->train(*std::move(prepared), into, meanwhile);
  steps += static_cast<std::int64_t>(results.size());
  times.steps += static_cast<std::int64_t>(results.size());
  lap.add_to(times.total);
  return results;
}

PerReplica<train::StepResult> ModelImpl::train_batch(PerReplica<internal::Part>& batch, train::Tracker& into) {
  Lap lap;
  auto results = strategy.run(
      [&](ReplicaContext& replica, const internal::Part& part) { return train_step(replica, part, into); }, batch);
  ++steps;
  ++times.steps;
  lap.add_to(times.total);
  return results;
}

}  // namespace lockstep
