#include <torch/nn/module.h>

#include <optional>
#include <set>
#include <string>

#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "lockstep/parallel/cut_stages.h"
#include "lockstep/parallel/gradients.h"
#include "lockstep/parallel/split.h"
#include "parallel/pipeline_run.h"
#include "parallel/plan_entries.h"

namespace lockstep {
namespace {

void check_mesh(const Split& split, const DeviceMesh& mesh) {
  for (const auto& axis : split.axes()) {
    const auto size = mesh.contains(axis.name) ? mesh.size(axis.name) : 1;
    if (size == axis.size) continue;
    throw InvalidArgument(
        text("SplitModel: the split has ", axis.name, " ", axis.size, " and the mesh ", axis.name, " ", size));
  }
}

Communicator axis_of(const DeviceMesh& mesh, const char* name) {
  return mesh.contains(name) ? mesh[name] : Communicator();
}

}  // namespace

std::vector<DeviceMesh::Axis> Split::axes() const {
  return {{"data", data}, {"pipeline", pipeline}, {"tensor", tensor}};
}

std::string Split::describe() const {
  std::vector<std::string> words;
  for (const auto& axis : axes()) {
    if (axis.size > 1) words.push_back(text(axis.name, " ", axis.size));
  }
  if (words.empty()) words.emplace_back("one rank");
  if (sharding == Sharding::gradients) words.emplace_back("ZeRO 2");
  if (sharding == Sharding::parameters) words.emplace_back("ZeRO 3");
  if (pipeline > 1) words.push_back(schedule_name);
  if (pipeline > 1 || microbatches > 1)
    words.push_back(text(microbatches, microbatches == 1 ? " microbatch" : " microbatches"));
  return join(words);
}

struct SplitModel::State {
  State(const std::vector<PipelineStage>& layers, const Split& with, const DeviceMesh& mesh, const ParallelPlan& plan)
      : split(with),
        all(mesh.ranks()),
        data(axis_of(mesh, "data")),
        stages(axis_of(mesh, "pipeline")),
        tensor(axis_of(mesh, "tensor")) {
    check_mesh(split, mesh);
    const auto counts =
        split.layers_of_stages.empty() ? std::vector<int>{static_cast<int>(layers.size())} : split.layers_of_stages;
    const auto used = std::make_shared<std::set<std::string>>();
    std::vector<PipelineStage> made;
    for (const auto& stage : join_layers(layers, counts)) {
      if (split.tensor == 1) {
        made.push_back(stage);
        continue;
      }
      made.push_back(stage.with([plan, used, ranks = tensor](torch::nn::Module& module) {
        parallelize_module(module, ranks, parallel::entries_for(module, plan, *used));
      }));
    }
    pipeline.emplace(std::move(made), stages,
                     PipelineOptions{.schedule = split.schedule, .microbatches = split.microbatches});
    if (split.tensor > 1) parallel::check_all_used(plan, *used, "SplitModel");
    if (split.sharding == Sharding::none) {
      parameters = pipeline->parameters();
      for (const auto& [number, stage] : pipeline->modules()) {
        broadcast(data, stage->parameters());
        broadcast(data, stage->buffers());
      }
    } else {
      shard();
    }
  }

  void shard() {
    sharded.emplace(data, FullyShardOptions{.reshard_after_forward = split.sharding == Sharding::parameters});
    for (const auto& [number, stage] : pipeline->modules()) {
      for (const auto& layer : stage->named_children()) sharded->add(*layer.value(), layer.key());
    }
    parameters = sharded->parameters();
  }

  double step(const Tensor& x, const Tensor& target, const SplitLoss& loss, const PipelineWeight& weight) {
    for (const auto* const given : {&x, &target}) {
      if (given->dim() > 0 && given->size(0) % data.size() == 0) continue;
      throw InvalidArgument(text("SplitModel::step: a batch of shape ", given->sizes(), " cannot be divided among ",
                                 data.size(), " ranks of the data axis"));
    }
    const auto part = [&](const Tensor& of) { return of.chunk(data.size())[static_cast<std::size_t>(data.rank())]; };
    const PipelineLoss own = [&](const Tensor& output, const Tensor& wanted) { return loss(output, wanted, tensor); };
    double mean = 0;
    if (weight) {
      const auto share = [&](const Tensor& /*part*/) { return weight(target) / data.size(); };
      mean = pipeline->step(part(x), part(target), own, share);
    } else {
      parallel::check_labels_count_alike("SplitModel::step", target, data.size());
      mean = pipeline->step(part(x), part(target), own);
    }
    if (!sharded) average_gradients(parameters, data);
    data.sum({&mean, 1});
    return mean / data.size();
  }

  const Split split;
  const Communicator all, data, stages, tensor;
  std::optional<Pipeline> pipeline;
  std::optional<FullyShardedParameters> sharded;
  std::vector<Tensor> parameters;
};

SplitModel::SplitModel(const std::vector<PipelineStage>& layers, const Split& split, const DeviceMesh& mesh,
                       const ParallelPlan& tensor)
    : state_(std::make_unique<State>(layers, split, mesh, tensor)) {}
SplitModel::~SplitModel() = default;

double SplitModel::step(const Tensor& x, const Tensor& target, const SplitLoss& loss) {
  return step(x, target, loss, {});
}

double SplitModel::step(const Tensor& x, const Tensor& target, const SplitLoss& sum, const PipelineWeight& weight) {
  double mean = 0;
  state_->all.abort_on_error([&] { mean = state_->step(x, target, sum, weight); });
  return mean;
}

double SplitModel::clip_grad_norm(double max_norm) {
  if (state_->sharded) return state_->sharded->clip_grad_norm(max_norm, state_->stages);
  return lockstep::clip_grad_norm(state_->parameters, max_norm, state_->stages);
}

const std::vector<Tensor>& SplitModel::parameters() const { return state_->parameters; }
Pipeline& SplitModel::pipeline() { return *state_->pipeline; }
FullyShardedParameters* SplitModel::sharded() { return state_->sharded ? &*state_->sharded : nullptr; }

}  // namespace lockstep
