#include "lockstep/parallel/model_parallel_strategy.h"

#include <algorithm>
#include <memory>

#include "base/text.h"
#include "parallel/layout_map.h"
#include "strategy/devices.h"
#include "strategy/strategy_impl.h"

namespace lockstep {
namespace {

using strategy::StrategySettings;

// A mesh with one rank alone along an axis that it does not have.
Communicator along(const DeviceMesh& mesh, const std::string& axis) {
  return mesh.contains(axis) ? mesh[axis] : Communicator();
}

class MeshParallelism final : public strategy::ModelParallelism {
 public:
  MeshParallelism(DeviceMesh mesh, ModelParallelOptions options)
      : mesh_(std::move(mesh)),
        options_(std::move(options)),
        data_(along(mesh_, options_.batch_axis)),
        tensor_(along(mesh_, options_.tensor_axis)) {}

  const Communicator& workers() const override { return mesh_.ranks(); }
  const Communicator& data_workers() const override { return data_; }
  bool counts() const override { return tensor_.rank() == 0; }

  void split(torch::nn::Module& module) const override {
    const auto& map = options_.layout_map;
    const auto plan = map.empty() ? options_.plan : parallel::plan_of(map, module, options_.tensor_axis);
    if (!plan.empty()) parallelize_module(module, tensor_, plan);
  }

 private:
  const DeviceMesh mesh_;
  const ModelParallelOptions options_;
  const Communicator data_, tensor_;
};

void check(const DeviceMesh& mesh, const ModelParallelOptions& options) {
  const auto fail = [](const auto&... what) { throw InvalidArgument(text("ModelParallelStrategy: ", what...)); };
  if (options.batch_axis == options.tensor_axis)
    fail("batch_axis and tensor_axis are both \"", options.batch_axis, "\"");
  for (const auto& axis : mesh.axes()) {
    if (axis.size == 1 || axis.name == options.batch_axis || axis.name == options.tensor_axis) continue;
    fail("the mesh has an axis \"", axis.name, "\", which is neither batch_axis, \"", options.batch_axis,
         "\", nor tensor_axis, \"", options.tensor_axis, "\"");
  }
  if (!options.plan.empty() && !options.layout_map.empty()) fail("there are a plan and a layout_map; give one of them");
  const bool divides = !options.plan.empty() || !options.layout_map.empty();
  const auto tensor = along(mesh, options.tensor_axis).size();
  if (tensor > 1 && !divides)
    fail("the mesh's axis \"", options.tensor_axis, "\" has size ", tensor, ", but there is no plan for it");
  if (divides && !mesh.contains(options.tensor_axis)) {
    fail("there is a plan, but the mesh has no axis \"", options.tensor_axis,
         "\"; one of size 1 lets one program run on all meshes");
  }
  if (!(options.bucket_cap_mb.value_or(1) > 0))
    fail("bucket_cap_mb is ", *options.bucket_cap_mb, "; it must be above 0");
  if (options.compare_copies_every < 0)
    fail("compare_copies_every is ", options.compare_copies_every, "; it must be 0 (never) or more steps");
}

StrategySettings settings_of(const DeviceMesh& mesh, const ModelParallelOptions& options) {
  mesh.ranks().abort_on_error([&] { check(mesh, options); });
  cluster::CpuPartition partition;
  if (const auto& job = mesh.job())
    partition = {job->world().local_rank, job->world().local_size, job->has_own_cores()};
  const auto bytes = static_cast<std::size_t>(options.bucket_cap_mb.value_or(0) * 1024 * 1024);
  StrategySettings settings{
      .devices = {options.device.empty() ? strategy::default_devices(partition).at(0) : options.device},
      .threads_per_replica = options.threads_per_replica,
      .partition = partition};
  settings.workers.emplace(
      strategy::WorkerSettings{.job = mesh.job(),
                               .buckets = {.bucket_bytes = bytes, .gradient_dtype = options.gradient_dtype},
                               .shard_optimizer_state = options.shard_optimizer_state,
                               .compare_copies_every = options.compare_copies_every});
  settings.parallelism = std::make_shared<MeshParallelism>(mesh, options);
  return settings;
}

}  // namespace

ModelParallelStrategy::ModelParallelStrategy(DeviceMesh mesh, ModelParallelOptions options)
    : Strategy(std::make_shared<StrategyImpl>(settings_of(mesh, options))), mesh_(std::move(mesh)) {}

}  // namespace lockstep
