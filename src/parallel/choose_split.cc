#include "parallel/choose_split.h"

#include <algorithm>
#include <array>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/parallel/cut_stages.h"

namespace lockstep::parallel {
namespace {

using ActionKind = PipelineAction::Kind;

struct NamedSchedule {
  const char* name;
  MakePipelineSchedule make;
  int stages_of_rank;
  bool splits_backward;
};

constexpr std::array<NamedSchedule, 5> kPlannedSchedules{{{"1f1b", schedules::one_forward_one_backward, 1, false},
                                                          {"gpipe", schedules::gpipe, 1, false},
                                                          {"interleaved", schedules::interleaved, 2, false},
                                                          {"zero_bubble", schedules::zero_bubble, 1, true},
                                                          {"zero_bubble_v", schedules::zero_bubble_v, 2, true}}};

// Candidates that differ in the number of microbatches alone.
struct Family {
  Split split;  // without microbatches and stages
  int stages_of_rank = 1;
  std::vector<int> microbatches;
  std::string refused;
};

LayerDivision layer_division(const Split& split) {
  return {split.tensor, split.sharding, split.sharding == Sharding::none ? 1 : split.data};
}

bool allows(const NamedSchedule& schedule, const Split& split, std::size_t layers) {
  if (split.pipeline == 1) return schedule.make == schedules::one_forward_one_backward;
  if (schedule.splits_backward && split.sharding != Sharding::none) return false;  // fully_shard needs it whole
  return static_cast<std::size_t>(schedule.stages_of_rank * split.pipeline) <= layers;
}

// Divides the examples of a data rank into microbatches.
void add_microbatches(Family& family, const PlanInput& input) {
  const auto& split = family.split;
  if (input.examples % split.data != 0) {
    family.refused = text("data ", split.data, " does not divide a batch of ", input.examples, " examples");
    return;
  }
  const auto mine = input.examples / split.data;
  for (const int count : input.options.microbatches) {
    const bool is_possible = split.schedule != schedules::interleaved || count % split.pipeline == 0;
    if (mine % count == 0 && is_possible) family.microbatches.push_back(count);
  }
  // Ranks of a pipeline with fewer microbatches would compute one after the other.
  auto& counts = family.microbatches;
  const auto is_few = [&](int count) { return count < split.pipeline; };
  if (!std::ranges::all_of(counts, is_few)) std::erase_if(counts, is_few);
  if (!counts.empty()) return;
  family.refused = text("no number of microbatches that is tried (", join(input.options.microbatches), ") divides ",
                        mine, " examples", split.schedule == schedules::interleaved ? " for this schedule" : "");
}

std::vector<Family> families_of(const PlanInput& input) {
  std::vector<Family> families;
  const auto add = [&](Split split) {
    for (const auto& schedule : kPlannedSchedules) {
      if (!allows(schedule, split, input.layers)) continue;
      split.schedule = schedule.make;
      split.schedule_name = schedule.name;
      families.push_back({.split = split, .stages_of_rank = schedule.stages_of_rank});
      add_microbatches(families.back(), input);
    }
  };
  for (int data = input.ranks; data >= 1; --data) {
    for (int pipeline = 1; input.ranks % data == 0 && pipeline <= input.ranks / data; ++pipeline) {
      const int tensor = input.ranks / data / pipeline;
      if (input.ranks != data * pipeline * tensor || (tensor > 1 && input.options.tensor.empty())) continue;
      for (const auto sharding : {Sharding::none, Sharding::gradients, Sharding::parameters}) {
        if (data == 1 && sharding != Sharding::none) continue;
        add({.data = data, .pipeline = pipeline, .tensor = tensor, .sharding = sharding});
      }
    }
  }
  if (std::ranges::any_of(families, [](const auto& each) { return each.refused.empty(); })) return families;
  if (families.empty()) {
    throw InvalidArgument(text("plan_parallel: ", input.layers, " layers and no patterns for tensor parallelism leave ",
                               "nothing to split over ", input.ranks, " ranks"));
  }
  throw InvalidArgument(text("plan_parallel: ", families[0].refused, ", and nothing else is possible"));
}

// One number of microbatches of a family.
class Candidate {
 public:
  Candidate(const PlanInput& input, const Profile& profile, const Family& family, int microbatches)
      : input_(input),
        profile_(profile),
        examples_(input.examples / family.split.data / microbatches),
        layers_(profile.divisions.at(layer_division(family.split))),
        whole_layers_(profile.divisions.at({.tensor = family.split.tensor})) {
    planned_.split = family.split;
    planned_.split.microbatches = microbatches;
    stages_ = family.stages_of_rank * family.split.pipeline;
  }

  PlannedSplit evaluate() && {
    const auto& split = planned_.split;
    planned_.refused = layers_.refused.empty() ? whole_layers_.refused : layers_.refused;
    const auto is_counted = [](const auto& layer) { return !layer.bytes.empty(); };
    if (planned_.refused.empty() && !std::ranges::all_of(whole_layers_.layers, is_counted))
      planned_.refused = "a layer alone does not fit";
    if (!planned_.refused.empty()) return std::move(planned_);
    planned_.is_computed = layers_.is_computed || (averages() && profile_.averages.at(split.data).ranks != split.data);
    const bool was_timed =
        std::ranges::all_of(layers_.layers, [&](const auto& layer) { return layer.times.contains(examples_); });
    planned_.split.layers_of_stages = cut(was_timed);
    const auto costs = stage_costs(was_timed);
    const auto schedule = split.schedule(split.pipeline, stages_, split.microbatches, costs);
    planned_.memory = memory_of(schedule);
    if (was_timed) planned_.seconds = seconds_of(schedule, costs);
    const auto total = planned_.memory.total();
    if (total > input_.options.memory_bytes) {
      planned_.refused = text("needs ", std::llround(total / (1 << 20)), " MiB of ",
                              std::llround(input_.options.memory_bytes / (1 << 20)));
    } else if (!was_timed) {
      planned_.refused = "a layer does not fit while it is measured";
    }
    return std::move(planned_);
  }

 private:
  bool averages() const { return planned_.split.data > 1 && planned_.split.sharding == Sharding::none; }

  LayerTimes times_of(std::size_t layer) const {
    const auto found = layers_.layers[layer].times.find(examples_);
    return found == layers_.layers[layer].times.end() ? LayerTimes() : found->second;
  }

  // In a step the first microbatch finds no gradients.
  double accumulate_of(std::size_t layer) const {
    return times_of(layer).accumulate * (planned_.split.microbatches - 1) / planned_.split.microbatches;
  }

  // Bytes grow with the examples where they were not counted for so many.
  LayerBytes bytes_of(std::size_t layer) const {
    const auto& counted = whole_layers_.layers[layer].bytes;
    const auto found = counted.find(examples_);
    if (found != counted.end()) return found->second;
    const auto& [examples, bytes] = *counted.rbegin();
    const auto scale = static_cast<double>(examples_) / static_cast<double>(examples);
    return {bytes.activations * scale, bytes.working * scale, bytes.input * scale, bytes.output * scale};
  }

  // Where a rank has one stage the bound of memory counts. A layer's parameter_bytes are all that is kept of their
  // size.
  std::vector<int> cut(bool was_timed) const {
    std::vector<LayerCost> costs;
    for (std::size_t i = 0; i < input_.layers; ++i) {
      const auto times = times_of(i);
      const auto& layer = layers_.layers[i];
      const auto bytes = (layer.parameter_bytes + (1 + input_.options.optimizer_states) * layer.trained_bytes) /
                         layer_division(planned_.split).shards;
      costs.push_back({was_timed ? times.forward + times.backward_input + times.backward_weight + accumulate_of(i)
                                 : layer.parameter_bytes + bytes_of(i).activations,
                       bytes, bytes_of(i).activations});
    }
    if (stages_ == planned_.split.pipeline) {
      try {
        return cut_stages(costs, stages_, {.most_bytes = input_.options.memory_bytes, .parameter_copies = 1});
      } catch (const InvalidArgument&) {  // none fits: evaluate says what the fastest needs
      }
    }
    return cut_stages(costs, stages_);
  }

  template <class Act>
  void for_each_stage(const Act& act) const {
    std::size_t first = 0;
    for (std::size_t stage = 0; stage < planned_.split.layers_of_stages.size(); ++stage) {
      const auto end = first + static_cast<std::size_t>(planned_.split.layers_of_stages[stage]);
      act(stage, first, end);
      first = end;
    }
  }

  std::vector<PipelineCosts> stage_costs(bool was_timed) const {
    if (!was_timed) return {{}};
    std::vector<PipelineCosts> costs;
    for_each_stage([&](std::size_t, std::size_t first, std::size_t end) {
      PipelineCosts stage{0, 0, 0, 0};
      for (auto i = first; i < end; ++i) {
        const auto times = times_of(i);
        stage.forward += times.forward;
        stage.backward_input += times.backward_input;
        stage.backward_weight += times.backward_weight + accumulate_of(i);
      }
      if (planned_.split.pipeline > 1) {
        const auto sent =
            std::max(first == 0 ? 0 : bytes_of(first).input, end == input_.layers ? 0 : bytes_of(end - 1).output);
        stage.message = profile_.messages.at(planned_.split.tensor).at(sent, 2);
      }
      costs.push_back(stage);
    });
    return costs;
  }

  double seconds_of(const PipelineSchedule& schedule, const std::vector<PipelineCosts>& costs) const {
    const auto& split = planned_.split;
    std::vector<double> bytes(static_cast<std::size_t>(split.pipeline)), update(bytes.size());
    for_each_stage([&](std::size_t stage, std::size_t first, std::size_t end) {
      const auto rank = static_cast<std::size_t>(schedule.rank_of_stage[stage]);
      for (auto i = first; i < end; ++i) {
        bytes[rank] += layers_.layers[i].trained_bytes;
        update[rank] += layers_.layers[i].update_seconds;
      }
    });
    double after = 0;
    for (std::size_t rank = 0; rank < bytes.size(); ++rank) {
      const double average = averages() ? profile_.averages.at(split.data).at(bytes[rank], split.data) : 0;
      after = std::max(after, average + update[rank]);
    }
    return predict_times(schedule, costs).total + after;
  }

  // The memory of the rank that needs most.
  SplitMemory memory_of(const PipelineSchedule& schedule) const {
    SplitMemory most;
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      const auto memory = memory_of(schedule, rank);
      if (memory.total() >= most.total()) most = memory;
    }
    return most;
  }

  SplitMemory memory_of(const PipelineSchedule& schedule, int rank) const {
    const auto& split = planned_.split;
    double parameters = 0, trained = 0, largest = 0, largest_trained = 0, working = 0;
    std::vector<double> kept(schedule.rank_of_stage.size());  // of a microbatch, by stage
    for_each_stage([&](std::size_t stage, std::size_t first, std::size_t end) {
      if (schedule.rank_of_stage[stage] != rank) return;
      kept[stage] = first == 0 ? 0 : bytes_of(first).input;
      for (auto i = first; i < end; ++i) {
        const auto& layer = layers_.layers[i];
        parameters += layer.parameter_bytes;
        trained += layer.trained_bytes;
        largest = std::max(largest, layer.parameter_bytes);
        largest_trained = std::max(largest_trained, layer.trained_bytes);
        kept[stage] += bytes_of(i).activations;
        working = std::max(working, bytes_of(i).working);
      }
    });
    const int shards = layer_division(split).shards;
    SplitMemory memory{.parameters = parameters / shards,
                       .gradients = trained / shards,
                       .optimizer = input_.options.optimizer_states * trained / shards,
                       .activations = most_kept(schedule, rank, kept),
                       .working = working};
    // Gathered parameters, and a unit's gradients twice: each parameter's own, and the memory that is reduced.
    if (split.sharding == Sharding::parameters) memory.parameters += largest;
    if (split.sharding == Sharding::gradients) memory.parameters += parameters;
    if (split.sharding != Sharding::none) memory.gradients += 2 * largest_trained;
    return memory;
  }

  // A microbatch's activations are kept from its forward until its backward has ended.
  static double most_kept(const PipelineSchedule& schedule, int rank, const std::vector<double>& kept) {
    double now = 0, most = 0;
    for (const auto& action : schedule.actions[static_cast<std::size_t>(rank)]) {
      const auto bytes = kept[static_cast<std::size_t>(action.stage)];
      if (action.kind == ActionKind::forward) now += bytes;
      most = std::max(most, now);
      if (action.kind == ActionKind::backward || action.kind == ActionKind::backward_weight) now -= bytes;
    }
    return most;
  }

  const PlanInput& input_;
  const Profile& profile_;
  const std::int64_t examples_;  // of a microbatch
  const DividedLayers& layers_;
  const DividedLayers& whole_layers_;  // without sharding
  PlannedSplit planned_;
  int stages_ = 1;
};

// More microbatches have to be so much faster: less is within what measurements vary by.
constexpr double kWorthMore = 1.02;

// The first number of microbatches that is as fast as the fastest that fits, or nearly; where none fits, the one that
// needs least.
PlannedSplit best_of(const PlanInput& input, const Profile& profile, const Family& family) {
  if (!family.refused.empty()) return {.split = family.split, .refused = family.refused};
  std::vector<PlannedSplit> fitting, others;
  for (const int count : family.microbatches) {
    auto planned = Candidate(input, profile, family, count).evaluate();
    (planned.refused.empty() ? fitting : others).push_back(std::move(planned));
  }
  if (fitting.empty()) {
    return *std::ranges::min_element(others, {}, [](const auto& each) { return each.memory.total(); });
  }
  const auto fastest = std::ranges::min_element(fitting, {}, &PlannedSplit::seconds);
  return *std::ranges::find_if(
      fitting, [most = kWorthMore * fastest->seconds](const auto& each) { return each.seconds <= most; });
}

}  // namespace

PlanNeeds needs_of(const PlanInput& input) {
  PlanNeeds needs;
  for (const auto& family : families_of(input)) {
    const auto& split = family.split;
    for (const int count : family.microbatches) {
      const auto examples = input.examples / split.data / count;
      needs.divisions[{.tensor = split.tensor}].insert(examples);  // bytes are of layers that are not sharded
      needs.divisions[layer_division(split)].insert(examples);
    }
    if (split.data > 1 && split.sharding == Sharding::none) needs.data_axes.insert(split.data);
    if (split.pipeline > 1) needs.tensor_axes.insert(split.tensor);
  }
  return needs;
}

SplitPlan choose_split(const PlanInput& input, const Profile& profile) {
  SplitPlan plan;
  for (const auto& family : families_of(input)) plan.candidates.push_back(best_of(input, profile, family));
  std::ranges::stable_sort(plan.candidates, [](const auto& a, const auto& b) {
    if (a.refused.empty() != b.refused.empty()) return a.refused.empty();
    return a.refused.empty() && a.seconds < b.seconds;
  });
  return plan;
}

}  // namespace lockstep::parallel
