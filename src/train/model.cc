#include "lockstep/train/model.h"

#include <ATen/ATen.h>

#include <atomic>
#include <set>
#include <utility>

#include "base/text.h"
#include "gradient/layer_over_ranks.h"
#include "lockstep/base/error.h"
#include "strategy/split.h"
#include "strategy/strategy_impl.h"
#include "train/fit_worker.h"
#include "train/layers/stack.h"
#include "train/model_impl.h"
#include "train/training.h"

namespace lockstep {

std::int64_t train::Definition::next_number() {
  static std::atomic<std::int64_t> models = 0;
  return ++models;
}

void ModelImpl::require_own(const char* caller) const {
  if (!definition.as_layer) return;
  throw InvalidArgument(text(
      caller, ": this Sequential is a part of the model in which it was nested, which has its weights: call ", caller,
      " of that model. For the outputs of this part alone make a model of its layers, nested likewise, as "
      "Sequential({Layer(Sequential({...}))}), and load what the whole model saved: "
      "load_weights(path, {.by_name = true})"));
}

void ModelImpl::build(const Example& sample) {
  require_own("build");
  if (parameters != nullptr) return;
  unwrap(strategy).workers().check_on_all([this] {
    policy.check(unwrap(strategy).replicas().devices());
    train::require_free(definition.layers, definition.number);
  });
  const auto made_execution = train::Execution::of(*this);
  auto made = made_execution->make_parameters(sample);
  if (state.pending_weights) {
    train::change_weights(state.pending_weights->first, state.pending_weights->second, made)();
    state.pending_weights.reset();
  }
  parameters = std::move(made);
  train::give_to(definition.layers, definition.number);
  if (sample.x.defined()) built_for = sample.x.sizes().vec();
  execution = made_execution;
  state.seed = std::stoull(topology.all.broadcast(std::to_string(state.seed)));
  make_gradient_path();
}

int ModelImpl::number_of(const ReplicaContext& replica) const {
  const auto all = replicas();
  const int number = (all.workers.rank() + part_of_step) * all.count() + replica.local_replica_id();
  const auto& positions = topology.positions;  // which have other tokens
  return number * positions.size() + positions.rank();
}

void ModelImpl::build_for(const Dataset& data, const char* caller) {
  require_own(caller);
  if (parameters != nullptr) return;
  const auto& all = unwrap(strategy);
  all.workers().abort_on_error([&] {
    Example first;
    all.workers().check_on_all([&] {
      first = strategy::first_element(data, all.local_replicas());
      if (!first.x.defined()) throw InvalidArgument(text(caller, ": the data set is empty"));
      strategy::check_batch(first);
    });
    build(first);
  });
}

void ModelImpl::make_gradient_path() {
  if (parameters == nullptr || !compiled) return;
  lead->fetch();  // what the servers of an earlier path have
  gradients = unwrap(strategy).make_gradient_path(compiled->optimizer, parameters);
  state.tracker.emplace(*compiled, strategy.num_local_replicas(), topology.all);
  frozen = parameters->describe_frozen();
  execution->forget_steps();
}

ModelImpl::Numbers ModelImpl::in_section(const std::string& what, const std::function<Numbers()>& act) {
  if (gradients == nullptr) {
    if (parameters != nullptr) parameters->regroup();
    return act();
  }
  if (fit.training != nullptr) return fit.training->run_or_act(act);
  const auto& all = unwrap(strategy);
  if (!all.workers().is_elastic() || all.workers().completed_sections().is_in_one) return act();
  train::FitWorker worker(*this, what, [] {});
  return train::Training::of(worker)->run_or_act(act);
}

void ModelImpl::check_on_all(const std::function<void()>& check) {
  unwrap(strategy).workers().check_on_all(topology.peers, topology.all.size() > 1 ? "worker" : "rank", check);
}

void ModelImpl::require_built(const char* caller) const {
  require_own(caller);
  if (parameters == nullptr) {
    throw InvalidArgument(text(caller, ": the model has no variables yet; call build(input_shape), or fit it first"));
  }
}

void ModelImpl::follow_requires_grad() {
  parameters->follow_first_replica();
  gradient::require_no_layers_over_ranks(parameters->module(0));
  parameters->require_known_trainable();
  auto now = parameters->describe_frozen();
  if (std::exchange(frozen, now) == now) return;
  execution->forget_steps();  // one that is played again, or compiled, trains what it trained when it was made
}

void ModelImpl::require_trainable() const {
  for (std::size_t i = 0; i < parameters->slots().size(); ++i) {
    if (parameters->parameter(0, i).requires_grad()) return;
  }
  if (strategy::has_rows_on_servers(parameters->module(0))) return;
  throw InvalidArgument(
      "the model has no trainable parameter: are all frozen, or was a submodule not registered (register_module)?");
}

void ModelImpl::require_compiled(const char* caller) const {
  if (!compiled)
    throw InvalidArgument(
        text(caller, ": the model is not compiled; call compile({.optimizer = ..., .loss = ...}) first"));
}

Model::Model(const internal::MakeModule& make, internal::ForwardOfModule forward)
    : impl_(std::make_shared<ModelImpl>(
          train::Definition{.make = [make](const Example&) { return make(); }, .forward = std::move(forward)})) {
  impl_->build({});
}

Model::Model(std::vector<PipelineStage> layers)
    : impl_(std::make_shared<ModelImpl>(train::Definition{
          .make = [layers](const Example&) { return std::make_shared<train::LayersModule>(layers, 0, layers.size()); },
          .forward = [](torch::nn::Module& module,
                        const Tensor& x) { return static_cast<train::LayersModule&>(module).forward(x); },
          .make_layers = [layers](const Example&) { return train::Layers{layers}; }})) {
  if (layers.empty()) throw InvalidArgument("Model: there are no layers");
}

Sequential::Sequential(std::vector<Layer> layers)
    : Model(std::make_shared<ModelImpl>(train::Definition{
          .make =
              [layers](const Example& sample) {
                return std::make_shared<train::StackModule>(layers, at::zeros_like(sample.x.slice(0, 0, 1)));
              },
          .forward = [](torch::nn::Module& module,
                        const Tensor& x) { return static_cast<train::StackModule&>(module).forward(x); },
          .make_layers = [layers](const Example& sample) { return train::pieces_of(layers, sample); }})),
      layers_(std::move(layers)) {
  if (layers_.empty()) throw InvalidArgument("Sequential: there are no layers");
  unwrap(*this).definition.layers = layers_;
}

void Model::compile(CompileOptions options) {
  impl_->require_own("compile");
  std::set<std::string> names{"loss"};
  for (const auto* metrics : {&options.metrics, &options.weighted_metrics}) {
    for (const auto& metric : *metrics) {
      if (!names.insert(metric.name()).second) {
        throw InvalidArgument(
            text("compile: two values would be called \"", metric.name(), "\"; give one metric another name"));
      }
    }
  }
  const auto& strategy = unwrap(impl_->strategy);
  require(options.steps_per_execution >= 1, "compile: steps_per_execution", options.steps_per_execution, "at least 1");
  if (options.steps_per_execution > 1 && impl_->lead->needs_each_step()) {
    throw InvalidArgument(
        "compile: steps_per_execution must be 1 with an elastic strategy, which agrees on its workers after each step, "
        "and with parameter servers");
  }
  if (impl_->fit.training != nullptr)
    throw InvalidArgument("compile: this model is in a fit; a callback of it cannot compile it");
  options.optimizer = impl_->policy.wrapped(options.optimizer);
  impl_->compiled = std::move(options);
  impl_->topology = strategy.topology();
  const auto& ranks = impl_->compiled->optimizer.options().gradient_ranks;
  if (ranks && impl_->topology.all.size() == 1) impl_->topology.take_steps_with(ranks->ranks, ranks->own_data);
  impl_->make_gradient_path();
}

void Model::build(const std::vector<std::int64_t>& input_shape, at::ScalarType dtype) {
  for (const auto size : input_shape) {
    require(size >= 0, "Model::build: a dimension of input_shape", size,
            "0 or more; the batch's dimension is left out");
  }
  std::vector<std::int64_t> sizes{1};
  sizes.insert(sizes.end(), input_shape.begin(), input_shape.end());
  impl_->build({.x = at::zeros(sizes, dtype)});
}

Logs Model::train_on_batch(const Example& batch) {
  impl_->require_compiled("train_on_batch");
  unwrap(impl_->strategy).workers().abort_on_error(impl_->topology.peers, [&] {
    strategy::check_batch(batch);
    impl_->build(batch);
    impl_->follow_requires_grad();
    impl_->require_trainable();
    impl_->gradients->prepare();
    impl_->state.tracker->reset();
    auto parts = strategy::split_batch(batch, impl_->replicas());
    std::vector<PerReplica<internal::Part>> one{std::move(parts)};
    impl_->state.tracker->add_batch(impl_->execution->train(one, *impl_->state.tracker)[0]);
  });
  return impl_->state.tracker->logs();
}

double Model::learning_rate() const {
  impl_->require_compiled("learning_rate");
  return impl_->gradients ? impl_->gradients->updater().learning_rate()
                          : impl_->compiled->optimizer.options().learning_rate.at(0);
}

void Model::set_learning_rate(double rate) {
  impl_->require_compiled("set_learning_rate");
  impl_->require_built("set_learning_rate");
  impl_->gradients->updater().set_learning_rate(rate);
}

std::int64_t Model::iterations() const { return impl_->gradients ? impl_->gradients->updater().iterations() : 0; }
void Model::stop_training() { impl_->fit.stopping = true; }
Strategy Model::strategy() const { return impl_->strategy; }
ReplicatedOptimizer Model::optimizer() const {
  impl_->require_compiled("optimizer");
  impl_->require_built("optimizer");
  return ReplicatedOptimizer(impl_->gradients);
}

StepTimes Model::step_times() const { return impl_->times; }

std::shared_ptr<torch::nn::Module> Model::first_module() const {
  impl_->require_built("module");
  impl_->lead->fetch();
  return impl_->parameters->module(0).shared_from_this();
}

ReplicatedModule Model::module() const {
  impl_->require_built("module");
  impl_->lead->fetch();
  return ReplicatedModule(impl_->parameters);
}

}  // namespace lockstep
