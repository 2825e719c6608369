#include "lockstep/parallel/model_parallel_strategy.h"

#include <algorithm>
#include <memory>
#include <set>

#include "base/text.h"
#include "parallel/mesh_backend.h"
#include "parallel/mesh_parallelism.h"
#include "strategy/devices.h"
#include "strategy/strategy_impl.h"

namespace lockstep {
namespace {

using strategy::StrategySettings;

void check(const DeviceMesh& mesh, const ModelParallelOptions& options) {
  const auto fail = [](const auto&... what) { throw InvalidArgument(text("ModelParallelStrategy: ", what...)); };
  const std::vector<std::string> used{options.batch_axis,  options.shard_axis,   options.pipeline_axis,
                                      options.tensor_axis, options.context_axis, options.expert_axis};
  if (std::set<std::string>(used.begin(), used.end()).size() < used.size())
    fail("two of batch_axis, shard_axis, pipeline_axis, tensor_axis, context_axis and expert_axis are one: ",
         join(used));
  for (const auto& axis : mesh.axes()) {
    if (axis.size == 1 || std::ranges::find(used, axis.name) != used.end()) continue;
    fail("the mesh has an axis \"", axis.name,
         "\", which is none of batch_axis, shard_axis, pipeline_axis, tensor_axis, context_axis and expert_axis: ",
         join(used));
  }
  const auto is_used = [&](const std::string& axis) { return mesh.contains(axis) && mesh.size(axis) > 1; };
  if (is_used(options.shard_axis)) {
    if (is_used(options.expert_axis)) fail("experts are for a mesh without the axis \"", options.shard_axis, "\"");
    if (!options.context_plan.empty() && is_used(options.context_axis))
      fail("context_plan is for a mesh without the axis \"", options.shard_axis, "\"");
  }
  if (is_used(options.pipeline_axis) && is_used(options.expert_axis) && options.layers_of_stages.empty())
    fail("give layers_of_stages: layers of experts cannot be measured, which communicate along \"", options.expert_axis,
         "\"");
  if (mesh.contains(options.shard_axis)) {
    if (options.shard_optimizer_state)
      fail("shard_optimizer_state is for a mesh without the axis \"", options.shard_axis,
           "\", which divides all state");
    if (options.bucket_cap_mb || options.gradient_dtype)
      fail("bucket_cap_mb and gradient_dtype are for a mesh without the axis \"", options.shard_axis, "\"");
    if (!options.tied.empty()) fail("tied parameters are for a mesh without the axis \"", options.shard_axis, "\"");
    if (options.fully_shard.replicas.size() > 1) fail("fully_shard.replicas are the ranks along batch_axis");
  } else if (!options.fully_shard.units.empty()) {
    fail("there are units of fully_shard, but the mesh has no axis \"", options.shard_axis, "\"");
  }
  if (!options.plan.empty() && !options.layout_map.empty()) fail("there are a plan and a layout_map; give one of them");
  const bool divides = !options.plan.empty() || !options.layout_map.empty();
  const auto tensor = mesh.contains(options.tensor_axis) ? mesh.size(options.tensor_axis) : 1;
  if (tensor > 1 && !divides)
    fail("the mesh's axis \"", options.tensor_axis, "\" has size ", tensor,
         ", but there is no plan for it; give options.plan or options.layout_map");
  if (divides && !mesh.contains(options.tensor_axis)) {
    fail("there is a plan, but the mesh has no axis \"", options.tensor_axis,
         "\"; one of size 1 lets one program run on all meshes");
  }
  if (options.context_dim < 1) fail("context_dim is ", options.context_dim, "; it must be 1 or more");
  if (!options.context_plan.empty() && !mesh.contains(options.context_axis))
    fail("there is a context_plan, but the mesh has no axis \"", options.context_axis, "\"");
  if (!mesh.contains(options.pipeline_axis)) {
    if (!options.layers_of_stages.empty() || options.stages_per_rank != 1 || !options.tied.empty() || options.recompute)
      fail("there are options of stages, but the mesh has no axis \"", options.pipeline_axis, "\"");
  } else if (options.stages_per_rank < 1) {
    fail("stages_per_rank is ", options.stages_per_rank, "; it must be 1 or more");
  }
  if (!(options.bucket_cap_mb.value_or(1) > 0))
    fail("bucket_cap_mb is ", *options.bucket_cap_mb, "; it must be above 0");
  if (options.elastic) {
    strategy::check("ModelParallelStrategy", *options.elastic);
    if (options.elastic->worker_batch)
      fail("elastic.worker_batch is for MultiWorkerMirroredStrategy; batches are global here");
    if (!mesh.options().elastic) fail("elastic is for a mesh that was made with {.elastic = true}");
    if (options.elastic->lost_host_seconds != ElasticOptions().lost_host_seconds)
      fail("elastic.lost_host_seconds is an option of the mesh here: {.group = {.lost_host_seconds = ",
           options.elastic->lost_host_seconds, "}, .elastic = true}");
    if (mesh.axes()[0].name != options.batch_axis) {
      fail("elastic: the mesh's first axis is \"", mesh.axes()[0].name, "\"; it must be batch_axis, \"",
           options.batch_axis, "\", along which ranks may be lost");
    }
    if (is_used(options.pipeline_axis) && options.layers_of_stages.empty())
      fail("elastic: give layers_of_stages, so that processes that come later have the same stages");
  } else if (mesh.job() && mesh.job()->is_newcomer()) {
    fail(
        "this process comes to a job that runs (LOCKSTEP_JOIN), which takes it in only where the options have elastic");
  }
  if (options.compare_copies_every < 0)
    fail("compare_copies_every is ", options.compare_copies_every, "; it must be 0 (never) or more steps");
}

// True for a process without a launcher, to which no other can come.
bool is_alone(const DeviceMesh& mesh) { return !mesh.job() || mesh.job()->stores() == nullptr; }

StrategySettings settings_of(const DeviceMesh& mesh, const ModelParallelOptions& options) {
  parallel::check_on_all(mesh.ranks(), [&] { check(mesh, options); });
  cluster::CpuPartition partition;
  if (const auto job = mesh.job()) {
    const auto world = job->is_newcomer() ? resolve_cluster().world : job->world();
    partition = {world.local_rank, world.local_size, job->has_own_cores()};
  }
  const auto bytes = static_cast<std::size_t>(options.bucket_cap_mb.value_or(0) * 1024 * 1024);
  StrategySettings settings{
      .devices = {options.device.empty() ? strategy::default_devices(partition).at(0) : options.device},
      .threads_per_replica = options.threads_per_replica,
      .partition = partition,
      .gradients = {.buckets = {.bucket_bytes = bytes, .gradient_dtype = options.gradient_dtype},
                    .shard_state = options.shard_optimizer_state,
                    .compare_copies_every = options.compare_copies_every},
      .timeouts = {.start = mesh.options().group.timeout_seconds,
                   .step = mesh.ranks().timeout_seconds(),
                   .regroup = options.elastic.value_or(ElasticOptions()).regroup_seconds,
                   .lost_host = mesh.options().group.lost_host_seconds}};
  auto& workers = settings.workers.emplace();
  workers.group = mesh.options().group;
  if (!is_alone(mesh)) workers.elastic = options.elastic;
  const auto parallelism = std::make_shared<parallel::MeshParallelism>(mesh, options);
  workers.membership = parallelism->membership();
  settings.kind = parallelism;
  return settings;
}

}  // namespace

ModelParallelOptions options_of(const Split& split, const ParallelPlan& tensor) {
  ModelParallelOptions options{.plan = tensor,
                               .schedule = split.schedule,
                               .microbatches = split.microbatches,
                               .layers_of_stages = split.layers_of_stages};
  if (!split.layers_of_stages.empty())
    options.stages_per_rank = static_cast<int>(split.layers_of_stages.size()) / split.pipeline;
  if (split.sharding == Sharding::none) return options;
  options.shard_axis = "data";
  options.batch_axis = "replica";  // which such a mesh does not have
  options.fully_shard = {.units = {"*"}, .reshard_after_forward = split.sharding == Sharding::parameters};
  return options;
}

ModelParallelStrategy::ModelParallelStrategy(DeviceMesh mesh, ModelParallelOptions options)
    : Strategy(std::make_shared<StrategyImpl>(settings_of(mesh, options))), mesh_(std::move(mesh)) {}

}  // namespace lockstep
