#include "parallel/pipeline_model.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <numeric>
#include <span>

#include "base/text.h"
#include "lockstep/parallel/cut_stages.h"
#include "ops/replica_random.h"
#include "parallel/plan_entries.h"

namespace lockstep::parallel {
namespace {

using train::Layers;

constexpr std::int64_t kMeasuredExamples = 4;

// Registers a stage's layers under their names in the model.
void add_layers(const torch::nn::Module& stage, bool numbered, torch::nn::Module& to) {
  for (const auto& layer : stage.named_children()) {
    if (numbered) to.register_module(layer.key(), layer.value());
    for (const auto& part : layer.value()->named_children()) {
      if (!numbered) to.register_module(part.key(), part.value());
    }
  }
}

std::vector<int> measured_cut(const std::function<Layers()>& make, int stages, const Tensor& sample, at::Device device,
                              const Communicator& ranks) {
  auto generator = ops::generator_of_thread();
  const auto random = generator.get_state();
  const auto layers = make().layers;
  std::vector<LayerCost> costs(layers.size());
  if (stages > 1)
    costs = measure_layers(layers, sample.narrow(0, 0, std::min(sample.size(0), kMeasuredExamples)).to(device), ranks);
  generator.set_state(random);
  return cut_stages(costs, stages);
}

void check(const std::vector<int>& layers_of_stages, const Layers& layers) {
  const auto sum = std::accumulate(layers_of_stages.begin(), layers_of_stages.end(), 0);
  const bool all_have_some = std::ranges::all_of(layers_of_stages, [](int count) { return count > 0; });
  if (all_have_some && sum == static_cast<int>(layers.layers.size())) return;
  throw InvalidArgument(text("ModelParallelStrategy: layers_of_stages has stages of ", join(layers_of_stages),
                             " layers, and the model has ", layers.layers.size(),
                             "; each stage must have one, and together they must have all"));
}

std::vector<int> cut(const MeshParallelism& parallelism, const std::function<Layers()>& make, const Tensor& sample,
                     at::Device device) {
  const auto& options = parallelism.options();
  const auto stages = parallelism.topology().stages.size() * options.stages_per_rank;
  if (options.layers_of_stages.empty()) return measured_cut(make, stages, sample, device, parallelism.topology().all);
  if (static_cast<int>(options.layers_of_stages.size()) == stages) return options.layers_of_stages;
  throw InvalidArgument(text("ModelParallelStrategy: layers_of_stages has ", options.layers_of_stages.size(),
                             " stages; ", parallelism.topology().stages.size(), " ranks with ", options.stages_per_rank,
                             " each have ", stages));
}

// "3.head.weight" of the layers of one stage.
StageParameter place_of(const std::string& name, const std::vector<int>& layers_of_stages) {
  const auto layer = whole_number(name.substr(0, name.find('.')));
  const auto layers = std::accumulate(layers_of_stages.begin(), layers_of_stages.end(), 0);
  if (!layer || *layer < 0 || *layer >= layers) {
    throw InvalidArgument(text("ModelParallelStrategy: the tied parameter \"", name,
                               "\" does not begin with the number of a layer, from 0 to ", layers - 1));
  }
  int stage = 0;
  for (auto end = layers_of_stages[0]; *layer >= end; end += layers_of_stages[static_cast<std::size_t>(stage)]) ++stage;
  return {stage, name};
}

// The state that functions that make stages share.
struct MakingStages {
  Layers layers;
  std::set<std::string> names, used;  // of modules and parameters; of patterns
  std::vector<std::string> modules;   // their names alone
  std::string description;
};

}  // namespace

PipelineModel::PipelineModel(const MeshParallelism& parallelism, const std::function<Layers()>& make,
                             const Tensor& sample, at::Device device)
    : workers_(parallelism.topology().stages), module_(std::make_shared<torch::nn::Module>()) {
  const auto& options = parallelism.options();
  const auto layers_of_stages = cut(parallelism, make, sample, device);
  const auto making = std::make_shared<MakingStages>();
  making->layers = make();
  check(layers_of_stages, making->layers);
  const bool numbered = making->layers.numbered;
  if (!numbered && !options.tied.empty())
    throw InvalidArgument("ModelParallelStrategy: tied parameters are for a Model of a list of layers");
  std::vector<PipelineStage> stages;
  for (const auto& stage : join_layers(making->layers.layers, layers_of_stages)) {
    stages.push_back(stage.with([making, &parallelism, device](torch::nn::Module& module) {
      module.to(device);
      torch::nn::Module named;
      add_layers(module, making->layers.numbered, named);
      for (const auto& each : named.named_modules("", /*include_self=*/false)) making->modules.push_back(each.key());
      making->names.insert(making->modules.begin(), making->modules.end());
      for (const auto& each : named.named_parameters()) making->names.insert(each.key());
      making->description += describe_parameters(named);
      parallelism.divide(named, making->used);
    }));
  }
  PipelineOptions pipeline{
      .schedule = options.schedule, .microbatches = options.microbatches, .recompute = options.recompute};
  for (const auto& copies : options.tied) {
    auto& places = pipeline.tied.emplace_back();
    for (const auto& name : copies) places.push_back(place_of(name, layers_of_stages));
  }
  pipeline_ = std::make_shared<Pipeline>(stages, parallelism.topology().stages, pipeline);
  for (const auto& [stage, layers] : pipeline_->modules()) add_layers(*layers, numbered, *module_);
  split_ = parallelism.shard(*module_, making->used);
  split_.description = making->description;
  split_.after_regroup = [all = pipeline_, of_shards = split_.after_regroup] {
    if (of_shards) of_shards();
    all->regroup();
  };
  for (const auto& pattern : options.fully_shard.units) {
    if (matches_any(pattern, making->modules)) making->used.insert(pattern);  // here, or in another rank's stages
  }
  parallelism.check_used(making->used, making->names);
}

void PipelineModel::forward_backward(const Tensor& x, const MicrobatchLoss& loss) {
  pipeline_->forward_backward(x, loss, most_microbatches(x.size(0)));
}

Tensor PipelineModel::forward(const Tensor& x) { return pipeline_->forward(x, most_microbatches(x.size(0))); }

std::int64_t PipelineModel::most_microbatches(std::int64_t examples) const {
  const auto& sharded_over = split_.summed_over;
  if (sharded_over)
    sharded_over->group().all_reduce(buffer_of(std::span(&examples, 1)), ReduceOp::min, sharded_over->deadline());
  return examples;
}

}  // namespace lockstep::parallel
