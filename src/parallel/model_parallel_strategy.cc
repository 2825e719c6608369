#include "lockstep/parallel/model_parallel_strategy.h"

#include <algorithm>
#include <memory>
#include <set>

#include "base/text.h"
#include "parallel/layout_map.h"
#include "parallel/split_shards.h"
#include "strategy/devices.h"
#include "strategy/strategy_impl.h"

namespace lockstep {
namespace {

using strategy::StrategySettings;

// This rank alone, along an axis that the mesh does not have.
Communicator along(const DeviceMesh& mesh, const std::string& axis) {
  return mesh.contains(axis) ? mesh[axis] : Communicator();
}

// The ranks along the product of two axes: those that share this rank's coordinates on all others.
Communicator along_both(const DeviceMesh& mesh, const std::string& first, const std::string& second) {
  const auto outer = along(mesh, first), inner = along(mesh, second);
  if (inner.size() == 1) return outer;
  if (outer.size() == 1) return inner;
  // The first of them names them all.
  const int color = std::stoi(outer.broadcast(inner.broadcast(std::to_string(mesh.ranks().rank()))));
  const auto group =
      mesh.ranks().group().split(color, outer.rank() * inner.size() + inner.rank(), mesh.ranks().deadline());
  return mesh.ranks().with_group(*group);
}

class MeshParallelism final : public strategy::ModelParallelism {
 public:
  MeshParallelism(DeviceMesh mesh, ModelParallelOptions options)
      : mesh_(std::move(mesh)),
        options_(std::move(options)),
        batch_(along(mesh_, options_.batch_axis)),
        shard_(along(mesh_, options_.shard_axis)),
        data_(along_both(mesh_, options_.batch_axis, options_.shard_axis)),
        tensor_(along(mesh_, options_.tensor_axis)) {}

  const Communicator& workers() const override { return mesh_.ranks(); }
  const Communicator& data_workers() const override { return data_; }
  const Communicator& gradient_workers() const override { return sums_in_backward() ? alone_ : data_; }
  bool sums_in_backward() const override { return mesh_.contains(options_.shard_axis); }
  bool counts() const override { return tensor_.rank() == 0; }

  gradient::SplitModule split(torch::nn::Module& module) const override {
    const auto& map = options_.layout_map;
    const auto plan = map.empty() ? options_.plan : parallel::plan_of(map, module, options_.tensor_axis);
    if (!plan.empty()) parallelize_module(module, tensor_, plan);
    if (sums_in_backward()) {
      auto options = options_.fully_shard;
      options.replicas = batch_;
      const auto units = std::make_shared<parallel::ShardedUnits>(shard_, options);
      parallel::add_units(module, options.units, [&](torch::nn::Module& unit, const std::string& name, bool keep) {
        units->add(unit, name, keep);
      });
      return parallel::split_shards(units, data_);
    }
    gradient::SplitModule split;
    for (const auto& each : module.named_parameters())
      split.trained.push_back({each.key(), each.value(), gradient::parts_of(each.value())});
    return split;
  }

 private:
  const DeviceMesh mesh_;
  const ModelParallelOptions options_;
  const Communicator alone_, batch_, shard_, data_, tensor_;
};

void check(const DeviceMesh& mesh, const ModelParallelOptions& options) {
  const auto fail = [](const auto&... what) { throw InvalidArgument(text("ModelParallelStrategy: ", what...)); };
  const std::vector<std::string> used{options.batch_axis, options.shard_axis, options.tensor_axis};
  if (std::set<std::string>(used.begin(), used.end()).size() < used.size())
    fail("two of batch_axis, shard_axis and tensor_axis are one: ", join(used));
  for (const auto& axis : mesh.axes()) {
    if (axis.size == 1 || std::find(used.begin(), used.end(), axis.name) != used.end()) continue;
    fail("the mesh has an axis \"", axis.name,
         "\", which is none of batch_axis, shard_axis and tensor_axis: ", join(used));
  }
  if (mesh.contains(options.shard_axis)) {
    if (options.shard_optimizer_state)
      fail("shard_optimizer_state is for a mesh without the axis \"", options.shard_axis,
           "\", which divides all state");
    if (options.bucket_cap_mb || options.gradient_dtype)
      fail("bucket_cap_mb and gradient_dtype are for a mesh without the axis \"", options.shard_axis, "\"");
    if (options.fully_shard.replicas.size() > 1) fail("fully_shard.replicas are the ranks along batch_axis");
  } else if (!options.fully_shard.units.empty()) {
    fail("there are units of fully_shard, but the mesh has no axis \"", options.shard_axis, "\"");
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
