#include "parallel/mesh_parallelism.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "base/text.h"
#include "parallel/layout_map.h"
#include "parallel/name_pattern.h"
#include "parallel/split_shards.h"
#include "parallel/tensor_entries.h"
#include "parallel/tied_parameters.h"

namespace lockstep::parallel {
namespace {

// This rank alone, along an axis that the mesh does not have.
Communicator along(const DeviceMesh& mesh, const std::string& axis) {
  return mesh.contains(axis) ? mesh[axis] : Communicator();
}

// The ranks along the product of two axes: those that share this rank's coordinates on all others.
Group group_along_both(const DeviceMesh& mesh, const std::string& outer, const std::string& inner) {
  // The first of them names them all.
  const int color = std::stoi(mesh[outer].broadcast(mesh[inner].broadcast(std::to_string(mesh.ranks().rank()))));
  return *mesh.ranks().group().split(color, mesh.ranks().rank(), mesh.ranks().deadline());
}

Communicator along_both(const DeviceMesh& mesh, const std::string& outer, const std::string& inner) {
  if (!mesh.contains(outer) || !mesh.contains(inner)) return along(mesh, mesh.contains(outer) ? outer : inner);
  return mesh.ranks().with_group(group_along_both(mesh, outer, inner));
}

// All names of a module's submodules and parameters.
std::vector<std::string> names_in(const torch::nn::Module& module) {
  auto names = module.named_modules("", /*include_self=*/false).keys();
  const auto parameters = module.named_parameters().keys();
  names.insert(names.end(), parameters.begin(), parameters.end());
  return names;
}

const std::string& pattern_of(const std::pair<std::string, std::vector<std::string>>& entry) { return entry.first; }
const std::string& pattern_of(const std::string& unit) { return unit; }

// The entries of a LayoutMap, or units, whose patterns match a name.
template <class Entries>
Entries fitting(const Entries& all, const std::vector<std::string>& names, std::set<std::string>& used) {
  Entries some;
  for (const auto& entry : all) {
    if (!matches_any(pattern_of(entry), names)) continue;
    some.push_back(entry);
    used.insert(pattern_of(entry));
  }
  return some;
}

}  // namespace

std::string describe(const torch::nn::Module& module) {
  std::string lines;
  for (const auto& each : module.named_parameters()) {
    lines += text(each.key(), " ", each.value().scalar_type(), " ", each.value().sizes(),
                  each.value().requires_grad() ? "" : " frozen", "\n");
  }
  return lines;
}

MeshParallelism::MeshParallelism(DeviceMesh mesh, ModelParallelOptions options)
    : mesh_(std::move(mesh)),
      options_(std::move(options)),
      batch_(along(mesh_, options_.batch_axis)),
      shard_(along(mesh_, options_.shard_axis)),
      data_(along_both(mesh_, options_.batch_axis, options_.shard_axis)),
      tensor_(along(mesh_, options_.tensor_axis)),
      pipeline_(along(mesh_, options_.pipeline_axis)),
      row_size_(mesh_.ranks().size() / batch_.size()) {
  if (!has_stages()) return;
  const auto stages = pipeline_.size() * options_.stages_per_rank;
  const auto schedule = options_.schedule(pipeline_.size(), stages, options_.microbatches, {{}});
  last_stage_ = schedule.rank_of_stage.back();
  const auto splits = [](const auto& action) { return action.kind == PipelineAction::Kind::backward_weight; };
  if (has_shards() && std::any_of(schedule.actions[0].begin(), schedule.actions[0].end(), splits)) {
    throw InvalidArgument(text("ModelParallelStrategy: schedule ", schedule.name,
                               " splits backward, which parameters that are sharded cannot; take ",
                               "one_forward_one_backward, or a mesh without the axis \"", options_.shard_axis, "\""));
  }
}

void MeshParallelism::regroup(const Job& job, double timeout_seconds) const {
  mesh_.regroup(job, timeout_seconds);
  if (mesh_.contains(options_.batch_axis) && has_shards())
    data_.regroup(group_along_both(mesh_, options_.batch_axis, options_.shard_axis));
}

gradient::SplitModule MeshParallelism::split(torch::nn::Module& module) const {
  if (has_stages()) {
    throw InvalidArgument(text("ModelParallelStrategy: a model that is one module cannot be cut into stages along \"",
                               options_.pipeline_axis, "\"; make the Model of a list of layers, or a Sequential"));
  }
  const auto all = names_in(module);
  auto description = describe(module);
  std::set<std::string> used;
  divide(module, used);
  auto split = shard(module, used);
  split.description = std::move(description);
  check_used(used, {all.begin(), all.end()});
  return split;
}

void MeshParallelism::divide(torch::nn::Module& module, std::set<std::string>& used) const {
  auto plan = entries_for(module, options_.plan, used);
  if (!options_.layout_map.empty())
    plan = plan_of(fitting(options_.layout_map, module.named_parameters().keys(), used), module, options_.tensor_axis);
  if (!plan.empty() && tensor_.size() > 1) parallelize_module(module, tensor_, plan);
}

gradient::SplitModule MeshParallelism::shard(torch::nn::Module& module, std::set<std::string>& used) const {
  if (has_shards()) {
    auto options = options_.fully_shard;
    options.replicas = batch_;
    const auto units = std::make_shared<ShardedUnits>(shard_, options);
    add_units(module, fitting(options.units, module.named_modules("", /*include_self=*/false).keys(), used),
              [&](torch::nn::Module& unit, const std::string& name, bool keep) { units->add(unit, name, keep); });
    return split_shards(units, module, data_);
  }
  gradient::SplitModule split{.same_parts = data_};
  for (const auto& each : module.named_parameters())
    split.trained.push_back({.name = each.key(),
                             .tensor = each.value(),
                             .parts = gradient::parts_of(each.value()),
                             .is_copy = is_tied_copy(each.value())});
  return split;
}

void MeshParallelism::check_used(const std::set<std::string>& used, const std::set<std::string>& names) const {
  const auto check = [&](const char* what, const std::string& pattern) {
    if (used.contains(pattern)) return;
    if (matches_any(pattern, {names.begin(), names.end()})) {
      throw InvalidArgument(text("ModelParallelStrategy: ", what, " has \"", pattern,
                                 "\", which is the name of a parameter; this style is for its layer"));
    }
    throw InvalidArgument(text("ModelParallelStrategy: ", what, " has \"", pattern, "\", which matches nothing; ",
                               suggestion(pattern, {names.begin(), names.end()})));
  };
  for (const auto& [pattern, style] : options_.plan) check("the plan", pattern);
  for (const auto& [pattern, layout] : options_.layout_map) check("layout_map", pattern);
  for (const auto& pattern : options_.fully_shard.units) check("fully_shard.units", pattern);
}

}  // namespace lockstep::parallel
