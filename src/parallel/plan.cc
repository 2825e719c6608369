#include "lockstep/parallel/plan.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <iomanip>
#include <span>

#include "base/text.h"
#include "lockstep/gradient/tensor_collectives.h"
#include "lockstep/parallel/cut_stages.h"
#include "ops/replica_random.h"
#include "parallel/choose_split.h"
#include "parallel/layer_measurements.h"
#include "parallel/measure_links.h"

namespace lockstep {
namespace {

constexpr int kSweeps = 2;  // over all divisions, so that what disturbs the machine for a while decides nothing

void check_plan(std::size_t layers, const Tensor& x, const Tensor& target, int present, const PlanOptions& options) {
  const auto fail = [](const auto&... what) { throw InvalidArgument(text("plan_parallel: ", what...)); };
  if (layers == 0) fail("there are no layers");
  if (options.ranks < 0) fail("ranks is ", options.ranks, "; it must be above 0, or 0 for those that measure");
  if (options.ranks > 0 && options.ranks < present)
    fail("ranks is ", options.ranks, ", but ", present, " measure; start as many as the plan is for, or fewer");
  if (present == 1 && options.ranks > 1)
    fail("one rank cannot measure what ", options.ranks, " would communicate; start 2, as by `lockstep run -n 2`");
  if (!x.defined() || x.dim() == 0 || x.size(0) == 0) fail("x has no examples; its first dimension counts them");
  if (!target.defined() || target.dim() == 0 || target.size(0) != x.size(0))
    fail("x has ", x.size(0), " examples, and target ", target.defined() && target.dim() > 0 ? target.size(0) : 0);
  if (!x.is_cpu()) fail("x is on ", x.device().str(), "; layers are measured on the CPU");
  if (options.microbatches.empty()) fail("there are no numbers of microbatches to try");
  for (const int count : options.microbatches) {
    if (count < 1) fail("a number of microbatches is ", count, "; it must be above 0");
  }
  if (!(options.memory_bytes > 0)) fail("memory_bytes is ", options.memory_bytes, "; it must be above 0");
  if (!(options.optimizer_states >= 0)) fail("optimizer_states is ", options.optimizer_states);
}

parallel::Profile measure_profile(const parallel::MeasureInput& input, const parallel::PlanNeeds& needs,
                                  parallel::MeasuredLinks& links) {
  parallel::Profile profile;
  parallel::LayerMeasurements layers(input, links);
  for (const auto& [division, examples] : needs.divisions) layers.count(division, examples);
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    for (const auto& [division, examples] : needs.divisions) layers.time(division);
  }
  for (const auto& [division, examples] : needs.divisions) profile.divisions[division] = layers.result(division);
  for (const int ranks : needs.data_axes) profile.averages[ranks] = links.average(ranks);
  for (const int ranks : needs.tensor_axes) profile.messages[ranks] = links.message(ranks);
  return profile;
}

std::string mib(double bytes) {
  return text(std::fixed, std::setprecision(bytes < (10 << 20) ? 1 : 0), bytes / (1 << 20));
}

std::string milliseconds(double seconds) { return text(std::fixed, std::setprecision(1), 1e3 * seconds); }

}  // namespace

const PlannedSplit& SplitPlan::best() const {
  if (!candidates.empty() && candidates.front().refused.empty()) return candidates.front();
  const auto need = [](const auto& each) { return each.memory.total() > 0 ? each.memory.total() : 1e300; };
  const auto least = std::ranges::min_element(candidates, {}, need);
  if (least == candidates.end()) throw InvalidArgument("SplitPlan::best: the plan has no candidates");
  throw InvalidArgument(
      text("plan_parallel: no split can be used; nearest is ", least->split.describe(), ": ", least->refused));
}

std::string SplitPlan::table(std::size_t most) const {
  std::vector<std::vector<std::string>> rows{
      {"split", "ms a step", "MiB a rank", "parameters", "gradients", "optimizer", "activations", "working"}};
  const std::span shown(candidates.data(), std::min(most, candidates.size()));
  for (const auto& each : shown) {
    const auto& memory = each.memory;
    rows.push_back({each.split.describe()});
    if (memory.total() == 0) continue;
    rows.back().push_back(each.seconds > 0 ? milliseconds(each.seconds) + (each.is_computed ? "*" : "") : "-");
    for (const double bytes :
         {memory.total(), memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.working})
      rows.back().push_back(mib(bytes));
  }
  std::vector<std::size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::ostringstream out;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (std::size_t column = 0; column < rows[i].size(); ++column) {
      const auto& words = rows[i][column];
      const std::string spaces(widths[column] - words.size(), ' ');
      out << (column == 0 ? words + spaces : "  " + spaces + words);
    }
    if (i > 0 && !candidates[i - 1].refused.empty()) out << "  refused: " << candidates[i - 1].refused;
    out << "\n";
  }
  if (shown.size() < candidates.size()) out << "and " << candidates.size() - shown.size() << " more\n";
  if (std::ranges::any_of(shown, [](const auto& each) { return each.is_computed; }))
    out << "* has costs of more ranks than measured: computed from those that were\n";
  return out.str();
}

SplitPlan plan_parallel(const std::vector<PipelineStage>& layers, const Tensor& x, const Tensor& target,
                        const SplitLoss& loss, const Communicator& ranks, const PlanOptions& options) {
  check_plan(layers.size(), x, target, ranks.size(), options);
  const int count = options.ranks == 0 ? ranks.size() : options.ranks;
  const parallel::PlanInput input{count, layers.size(), x.size(0), options};
  const auto needs = parallel::needs_of(input);
  std::int64_t fewest = x.size(0);
  for (const auto& [division, examples] : needs.divisions) {
    if (!examples.empty()) fewest = std::min(fewest, *examples.begin());
  }
  // A mesh, since all its Groups end where a rank of one is lost.
  const DeviceMesh mesh({{"ranks", -1}}, ranks);
  parallel::MeasuredLinks links(mesh.ranks());
  auto generator = ops::generator_of_thread();
  const auto random = generator.get_state();
  parallel::Profile profile;
  mesh.ranks().abort_on_error([&] {
    const auto named = join_layers(layers, std::vector<int>(layers.size(), 1));  // modules are called "i.name"
    // All ranks get one rank's batch, as those of a tensor group have it.
    const auto same_x = x.clone(at::MemoryFormat::Contiguous), same_target = target.clone(at::MemoryFormat::Contiguous);
    broadcast(mesh.ranks(), {same_x, same_target});
    profile = measure_profile({named, same_x, same_target, loss, options, fewest}, needs, links);
  });
  generator.set_state(random);
  return parallel::choose_split(input, profile);
}

}  // namespace lockstep
