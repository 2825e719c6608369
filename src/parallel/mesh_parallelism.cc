#include "parallel/mesh_parallelism.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>

#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "parallel/divided_parameter.h"
#include "parallel/exchange.h"
#include "parallel/gradients.h"
#include "parallel/mesh_execution.h"
#include "parallel/plan_entries.h"
#include "parallel/sharded_units.h"
#include "parallel/tied_parameters.h"
#include "train/model_impl.h"

namespace lockstep::parallel {
namespace {

// The ranks along the product of some axes: those that share this rank's coordinates on all others.
Group group_along(const DeviceMesh& mesh, const std::vector<std::string>& axes, Deadline deadline) {
  int color = mesh.ranks().rank(), stride = mesh.ranks().size();
  for (const auto& axis : mesh.axes()) {
    stride /= axis.size;
    if (std::ranges::find(axes, axis.name) != axes.end()) color -= mesh.coordinate(axis.name) * stride;
  }
  return *mesh.ranks().group().split(color, mesh.ranks().rank(), deadline);
}

std::vector<std::string> existing(const DeviceMesh& mesh, std::vector<std::string> axes) {
  std::erase_if(axes, [&](const auto& axis) { return !mesh.contains(axis); });
  return axes;
}

Communicator along(const DeviceMesh& mesh, const std::vector<std::string>& some) {
  const auto axes = existing(mesh, some);
  if (axes.size() < 2) return axes.empty() ? Communicator() : mesh[axes[0]];
  return mesh.ranks().with_group(group_along(mesh, axes, mesh.ranks().deadline()));
}

int product_without(const DeviceMesh& mesh, const std::string& axis) {
  int product = 1;
  for (const auto& each : mesh.axes()) product *= each.name == axis ? 1 : each.size;
  return product;
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

std::string describe_parameters(const torch::nn::Module& module) {
  std::string lines;
  for (const auto& each : module.named_parameters()) {
    const auto parts = gradient::parts_of(each.value());
    if (parts != nullptr && !parts->make_up_a_whole()) continue;  // of this rank alone, as its experts are
    lines += gradient::description_line(each.key(), each.value());
  }
  for (const auto& each : module.named_buffers())
    lines += text("buffer ", each.key(), " ", each.value().scalar_type(), " ", each.value().sizes(), "\n");
  return lines;
}

MeshParallelism::MeshParallelism(DeviceMesh mesh, ModelParallelOptions options)
    : mesh_(std::move(mesh)),
      options_(std::move(options)),
      shard_(along(mesh_, {options_.shard_axis})),
      expert_(along(mesh_, {options_.expert_axis})),
      copies_(along(mesh_, {options_.batch_axis, options_.context_axis})),
      summed_(along(mesh_, {options_.expert_axis, options_.context_axis})) {
  topology_.all = topology_.peers = mesh_.ranks();
  topology_.data = along(mesh_, axes_with_other_examples());
  topology_.tokens = along(mesh_, axes_with_other_tokens());
  topology_.same_part = along(mesh_, {options_.batch_axis});
  if (!has_shards()) topology_.gradients = topology_.same_part;
  topology_.positions = along(mesh_, {options_.context_axis});
  topology_.tensor = along(mesh_, {options_.tensor_axis});
  topology_.stages = along(mesh_, {options_.pipeline_axis});
  topology_.is_split = true;
  topology_.row_size = product_without(mesh_, options_.batch_axis);
  topology_.part = mesh_.part();
  topology_.computes_without_examples = has_shards() || has_stages() || has_experts();
  if (!has_stages()) return;
  const auto ranks = topology_.stages.size();
  const auto schedule = options_.schedule(ranks, ranks * options_.stages_per_rank, options_.microbatches, {{}});
  topology_.last_stage = schedule.rank_of_stage.back();
  const auto splits = [](const auto& action) { return action.kind == PipelineAction::Kind::backward_weight; };
  if (has_shards() && std::ranges::any_of(schedule.actions[0], splits)) {
    throw InvalidArgument(text("ModelParallelStrategy: schedule ", schedule.name,
                               " splits backward, which parameters that are sharded cannot; take ",
                               "one_forward_one_backward, or a mesh without the axis \"", options_.shard_axis, "\""));
  }
}

// The mesh was made of ranks that have found each other.
void MeshParallelism::connect(Topology& /*topology*/, const strategy::WorkerSettings& /*workers*/,
                              const Timeouts& /*timeouts*/) const {}

void MeshParallelism::reconnect(const Topology& /*topology*/, const strategy::WorkerSettings& /*workers*/,
                                const Timeouts& timeouts) const {
  mesh_.regroup(timeouts.regroup);
  const auto deadline = Deadline::after(std::chrono::duration<double>(timeouts.regroup));
  const auto regroup = [&](const Communicator& product, const std::vector<std::string>& some) {
    const auto axes = existing(mesh_, some);
    if (axes.size() > 1) product.regroup(group_along(mesh_, axes, deadline));
  };
  regroup(topology_.data, axes_with_other_examples());
  regroup(topology_.tokens, axes_with_other_tokens());
  regroup(copies_, {options_.batch_axis, options_.context_axis});
  regroup(summed_, {options_.expert_axis, options_.context_axis});
}

// The mesh goes on with the generations of this strategy's job: it throws where another strategy has said so.
void MeshParallelism::begin(StrategyImpl& /*strategy*/) {
  if (options_.elastic) mesh_.claim_for_elastic_strategy();
}

std::string MeshParallelism::describe() const {
  std::string lines = "\n";
  const auto add = [&](const auto&... words) { lines += text(words..., "\n"); };
  for (const auto& axis : mesh_.axes()) {
    if (axis.name != options_.batch_axis) add("axis ", axis.name, " ", axis.size);
  }
  for (const auto& [pattern, style] : options_.plan) add("plan ", pattern);
  for (const auto& [pattern, style] : options_.context_plan) add("context_plan ", pattern);
  for (const auto& [pattern, axes] : options_.layout_map) add("layout_map ", pattern, " ", join(axes));
  add("units ", join(options_.fully_shard.units));
  add("layers_of_stages ", join(options_.layers_of_stages));
  add("stages_per_rank ", options_.stages_per_rank, "\nmicrobatches ", options_.microbatches);
  for (const auto& names : options_.tied) add("tied ", join(names));
  add("context_dim ", options_.context_dim);
  return lines;
}

std::vector<std::string> MeshParallelism::axes_with_other_examples() const {
  return {options_.batch_axis, options_.shard_axis, options_.expert_axis};
}

std::vector<std::string> MeshParallelism::axes_with_other_tokens() const {
  auto axes = axes_with_other_examples();
  axes.push_back(options_.context_axis);
  return axes;
}

Example MeshParallelism::own_positions(const Example& whole, std::int64_t positions) const {
  if (topology_.positions.size() == 1) return whole;
  const auto dim = options_.context_dim;
  const auto fail = [&](const auto&... what) {
    throw InvalidArgument(text("ModelParallelStrategy: ", what..., "; dimension ", dim,
                               " is context_dim, positions that are divided along \"", options_.context_axis, "\""));
  };
  if (whole.x.dim() <= dim) fail("x has shape ", whole.x.sizes());
  const auto length = whole.x.size(dim);
  if (length % topology_.positions.size() != 0)
    fail("x has ", length, " positions, which are no multiple of the ", topology_.positions.size(), " ranks");
  if (positions > 0 && length != positions)
    fail("x has ", length, " positions, and a parameter of context_plan has ", positions, ", which must be as many");
  const auto part = [&](const char* name, const Tensor& tensor) {
    if (tensor.dim() <= dim || tensor.size(dim) != length)
      fail(name, " has shape ", tensor.sizes(), ", and x has ", length, " positions");
    return part_of(tensor, dim, topology_.positions.rank(), topology_.positions.size()).contiguous();
  };
  const bool has_weights = whole.weight.defined() && whole.weight.dim() > dim;
  return {part("x", whole.x), whole.y.defined() ? part("y", whole.y) : whole.y,
          has_weights ? part("sample_weight", whole.weight) : whole.weight};
}

std::unique_ptr<ContextParallel> MeshParallelism::use_context() const {
  return topology_.positions.size() > 1 ? std::make_unique<ContextParallel>(topology_.positions) : nullptr;
}

Tensor MeshParallelism::whole_positions(const Tensor& part) const {
  if (topology_.positions.size() == 1 || !part.defined()) return part;
  const auto dim = options_.context_dim;
  if (part.dim() <= dim) {
    throw InvalidArgument(text("predict: the model's output has shape ", part.sizes(), "; dimension ", dim,
                               ", context_dim, must be positions"));
  }
  return all_gather(topology_.positions.group(), part.contiguous(), topology_.positions.deadline(), dim);
}

std::shared_ptr<ReplicatedParameters> MeshParallelism::replicate(
    StrategyImpl& strategy, const std::vector<std::shared_ptr<torch::nn::Module>>& modules) const {
  return std::make_shared<ReplicatedParameters>(modules[0], split(*modules[0]), strategy.placement(),
                                                strategy.topology());
}

std::shared_ptr<train::Execution> MeshParallelism::execution(ModelImpl& model) const {
  if (has_stages() && model.definition.make_layers) return std::make_shared<StagedExecution>(model, *this);
  return std::make_shared<MeshExecution>(model, *this);
}

gradient::ModelPart MeshParallelism::split(torch::nn::Module& module) const {
  if (has_stages() && topology_.stages.size() > 1) {
    throw InvalidArgument(text("ModelParallelStrategy: a model that is one module cannot be cut into stages along \"",
                               options_.pipeline_axis, "\"; make the Model of a list of layers, or a Sequential"));
  }
  const auto all = names_in(module);
  auto description = describe_parameters(module);
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
  if (!plan.empty() && topology_.tensor.size() > 1) parallelize_module(module, topology_.tensor, plan);
  const auto of_positions = entries_for(module, options_.context_plan, used);
  if (!of_positions.empty() && topology_.positions.size() > 1)
    parallelize_module(module, topology_.positions, of_positions);
}

gradient::ModelPart MeshParallelism::shard(torch::nn::Module& module, std::set<std::string>& used) const {
  if (has_shards()) {
    auto options = options_.fully_shard;
    options.replicas = copies_;
    options.cpu_offload = true;  // as other parameters, which devices have copies of
    const auto units = std::make_shared<ShardedUnits>(shard_, options);
    add_units(module, fitting(options.units, module.named_modules("", /*include_self=*/false).keys(), used),
              [&](torch::nn::Module& unit, const std::string& name, bool keep) { units->add(unit, name, keep); });
    auto split = own_part(units, module);
    split.summed_over = topology_.tokens;
    return split;
  }
  gradient::ModelPart split;
  // On a larger mesh these are units.
  fitting(options_.fully_shard.units, module.named_modules("", /*include_self=*/false).keys(), used);
  if (expert_.size() > 1 || topology_.positions.size() > 1) {
    split.summed_over = summed_;
    split.after_backward = [parameters = module.parameters(), expert = expert_, context = topology_.positions] {
      for (const auto& ranks : {expert, context}) sum_gradients(parameters, ranks);
    };
  }
  for (const auto& each : module.named_parameters()) {
    split.trained.push_back({.name = each.key(),
                             .tensor = each.value(),
                             .parts = gradient::parts_of(each.value()),
                             .is_copy = is_tied_copy(each.value())});
    const auto divided = division_of(each.value());
    if (topology_.positions.size() > 1 && divided != nullptr && is_divided_among(each.value(), topology_.positions))
      split.positions = divided->whole_sizes(each.value().sizes())[static_cast<std::size_t>(divided->division().dim)];
  }
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
  for (const auto& [pattern, style] : options_.context_plan) check("context_plan", pattern);
  for (const auto& [pattern, layout] : options_.layout_map) check("layout_map", pattern);
  for (const auto& pattern : options_.fully_shard.units) check("fully_shard.units", pattern);
}

}  // namespace lockstep::parallel
