// For tests: LibTorch loops on meshes, drawn by a seed.
#pragma once

#include "drawn_mesh_plan.h"

namespace lockstep {

using Axes = std::vector<DeviceMesh::Axis>;

// A batch of all ranks, and where the part of each that has other examples begins; ends with the number of examples.
struct MeshBatch {
  std::uint64_t seed = 0;
  std::vector<std::int64_t> begins;
  std::int64_t examples() const { return begins.back(); }
};

struct MeshStep {
  std::vector<MeshBatch> batches;    // one, or two whose gradients add up
  bool both_forwards_first = false;  // before the backwards
  bool second_backward_first = false;
  bool extra_forward = false;  // more than backwards
  bool evaluates = false;      // before, in eval() and without gradients
  bool set_to_none = true;     // of zero_grad
};

struct MeshLoop {
  MeshNetOptions net;
  Axes axes;
  DrawnPlan plan;
  FullyShardOptions sharding;
  bool ddp = false;     // over data, in the place of average_gradients
  bool scaled = false;  // losses are scaled by the examples, in the place of weights of averages
  bool adamw = false, negative_id = false;
  double max_norm = 0, penalty = 0, balance = 0;  // 0: none
  MakePipelineSchedule schedule = schedules::one_forward_one_backward;
  const char* schedule_name = "1f1b";
  int stages_of_rank = 1, microbatches = 2;
  std::vector<MeshStep> steps;

  int size(const std::string& axis) const {
    for (const auto& each : axes) {
      if (each.name == axis) return each.size;
    }
    return 0;  // the mesh has none
  }
  bool has(const std::string& axis) const { return size(axis) > 0; }
  int at_least_1(const std::string& axis) const { return std::max(1, size(axis)); }
  int ranks() const {
    int all = 1;
    for (const auto& axis : axes) all *= axis.size;
    return all;
  }
  // Ranks that have other examples.
  int parts() const { return at_least_1("data") * at_least_1("shard") * at_least_1("expert"); }
  int stages() const { return has("pipeline") ? size("pipeline") * stages_of_rank : 1; }
  bool is_wrong() const {
    const auto tensor = at_least_1("tensor");
    return plan.wrong || negative_id || net.width % tensor != 0 || net.heads % tensor != 0;
  }
  bool has_norm() const {
    return std::find(net.layers.begin(), net.layers.end(), Kind::batch_norm) != net.layers.end();
  }
  bool in_16_bits() const { return net.dtype != at::kDouble && net.dtype != at::kFloat; }

  std::string text() const {
    std::vector<std::string> words{net.text()};
    for (const auto& axis : axes) words.push_back(lockstep::text(axis.name, axis.size));
    if (has("tensor")) words.push_back(lockstep::text(plan.wrong ? "wrong plan " : "plan ", describe(plan.plan)));
    if (has("shard")) {
      words.push_back(lockstep::text(sharding.units.size(), " units", sharding.reshard_after_forward ? "" : " stage 2",
                                     sharding.prefetch ? " prefetched" : "", sharding.param_dtype ? " bfloat16" : ""));
    }
    if (has("pipeline")) words.push_back(lockstep::text(schedule_name, " ", stages(), " stages ", microbatches));
    if (ddp) words.emplace_back("DDP");
    if (scaled) words.emplace_back("scaled losses");
    words.emplace_back(adamw ? "AdamW" : "SGD");
    if (max_norm > 0) words.push_back(lockstep::text("clip ", max_norm));
    if (penalty > 0) words.emplace_back("penalty");
    if (balance > 0) words.emplace_back("balance");
    if (negative_id) words.emplace_back("negative id");
    for (const auto& step : steps) {
      std::vector<std::string> parts;
      if (step.evaluates) parts.emplace_back("evaluate");
      if (step.extra_forward) parts.emplace_back("extra forward");
      for (const auto& batch : step.batches) parts.push_back(lockstep::text(batch.begins));
      if (step.both_forwards_first)
        parts.emplace_back(step.second_backward_first ? "2 forwards, backwards 2 1" : "2 forwards");
      if (!step.set_to_none) parts.emplace_back("zeros");
      words.push_back("(" + join(parts, " ") + ")");
    }
    return join(words, ", ");
  }
};

inline MeshBatch draw_batch(Draw& draw, int parts, std::int64_t at_least, bool even) {
  MeshBatch batch{.seed = static_cast<std::uint64_t>(draw.between(1, 1'000'000)), .begins = {0}};
  std::int64_t each = draw.between(1, 3);
  for (int i = 0; i < parts; ++i) {
    if (!even) each = draw.between(static_cast<int>(at_least), 4);
    batch.begins.push_back(batch.begins.back() + each);
  }
  if (batch.examples() == 0) batch.begins.back() = 1;
  return batch;
}

inline Axes draw_axes(Draw& draw) {
  std::vector<std::string> names{"data", "shard", "tensor", "pipeline", "context", "expert"};
  Axes axes;
  int ranks = 1;
  for (int left = draw.between(1, 3); left > 0 && !names.empty(); --left) {
    const auto i = names.begin() + draw.between(0, static_cast<int>(names.size()) - 1);
    const int most = 4 / ranks;
    axes.push_back({*i, most == 1 ? 1 : draw.between(draw.chance(85) ? 2 : 1, std::min(3, most))});
    ranks *= axes.back().size;
    const auto other = *i == "shard" ? "expert" : *i == "expert" ? "shard" : "";
    names.erase(i);
    std::erase(names, other);
  }
  if (ranks == 1) axes.back().size = 2;
  return axes;
}

inline MeshNetOptions draw_mesh_net(Draw& draw, const MeshLoop& loop) {
  MeshNetOptions net{.embedding = draw.chance(60), .tokens = draw.chance(50), .recompute = draw.chance(15)};
  std::vector<Kind> kinds{Kind::linear, Kind::tied,        Kind::masked,    Kind::shared,        Kind::frozen,
                          Kind::unused, Kind::layer_norm,  Kind::attention, Kind::frozen_weight, Kind::feed_forward,
                          Kind::lora,   Kind::multi_query, Kind::einsum,    Kind::weight_norm};
  const bool stages = loop.has("pipeline");
  if (!stages && !loop.has("shard") && !loop.has("context") && !loop.has("expert") && !net.recompute)
    kinds.push_back(Kind::batch_norm);
  if (loop.has("context") || draw.chance(30))
    kinds = {Kind::attention, Kind::multi_query, Kind::feed_forward, Kind::layer_norm};
  if (loop.has("context")) net.tokens = true;
  const int least = std::max(1, loop.stages() - 2);
  for (int i = draw.between(least, least + 2); i > 0; --i)
    net.layers.push_back(kinds[static_cast<std::size_t>(draw.between(0, static_cast<int>(kinds.size()) - 1))]);
  if (loop.has("expert"))
    net.layers[static_cast<std::size_t>(draw.between(0, static_cast<int>(net.layers.size()) - 1))] = Kind::experts;
  net.places = draw.chance(loop.has("context") ? 60 : 20);
  net.freeze_front = draw.chance(10) && std::any_of(net.layers.begin(), net.layers.end(), [](Kind kind) {
                       return kind != Kind::frozen && kind != Kind::unused;
                     });
  if (net.embedding && draw.chance(50)) net.tie = draw.one_of({Tie::linear, Tie::product, Tie::assigned});
  if (stages && (loop.has("tensor") || (loop.has("shard") && loop.stages() > 1 && !draw.chance(10))))
    net.tie = Tie::none;
  const auto narrow = std::max(2, loop.size("tensor"));
  if (draw.chance(8)) net.width = net.heads = narrow;  // parts of one feature, which broadcast
  if (draw.chance(4)) {
    net.width = 10;
    net.heads = 2;
  }
  net.top_k = draw.between(1, 2);
  net.seed = static_cast<std::uint64_t>(draw.between(1, 1000));
  return net;
}

inline void draw_schedule_of(Draw& draw, MeshLoop& loop) {
  struct Choice {
    MakePipelineSchedule schedule;
    const char* name;
    int stages;
  };
  const Choice all[] = {{schedules::gpipe, "gpipe", 1},
                        {schedules::one_forward_one_backward, "1f1b", 1},
                        {schedules::interleaved, "interleaved", 2},
                        {schedules::zero_bubble, "zero_bubble", 1},
                        {schedules::zero_bubble_v, "zero_bubble_v", 2}};
  const auto& choice = all[draw.between(0, loop.has("shard") ? 2 : 4)];
  loop.schedule = choice.schedule;
  loop.schedule_name = choice.name;
  loop.stages_of_rank = choice.stages;
  loop.microbatches = draw.between(1, 4);
  if (std::string(choice.name) == "interleaved") loop.microbatches = loop.size("pipeline") * draw.between(1, 2);
}

// A layer of stages becomes a batch normalization. Separate draws leave unchanged what seeds drew before.
inline void draw_norm_of_stages(std::uint64_t seed, MeshLoop& loop) {
  Draw draw(seed + 2'000'000);
  const bool others = loop.has("shard") || loop.has("context") || loop.has("expert") || loop.plan.divided_sequence;
  if (!loop.has("pipeline") || others || loop.in_16_bits() || !draw.chance(30)) return;
  const int i = draw.between(0, static_cast<int>(loop.net.layers.size()) - 1);
  loop.net.layers[static_cast<std::size_t>(i)] = Kind::batch_norm;
  std::erase_if(loop.plan.plan, [&](const auto& entry) { return entry.first.starts_with(text(i + 1, ".")); });
}

inline MeshLoop draw_mesh_loop(std::uint64_t seed) {
  Draw draw(seed);
  MeshLoop loop{.axes = draw_axes(draw)};
  if (loop.has("pipeline")) draw_schedule_of(draw, loop);
  loop.net = draw_mesh_net(draw, loop);
  auto& net = loop.net;
  const bool is_exact = !draw.chance(12) || loop.has("expert");
  if (!is_exact) net.dtype = draw.one_of({at::kBFloat16, at::kHalf});
  if (loop.has("tensor")) loop.plan = draw_plan(draw, net, loop.has("context"), is_exact);
  if (loop.has("shard")) {
    loop.sharding.reshard_after_forward = draw.chance(70);
    loop.sharding.prefetch = draw.chance(20);
    for (std::size_t i = 0; i < net.layers.size(); ++i) {
      if (draw.chance(60)) loop.sharding.units.push_back(std::to_string(i + 1));
    }
  }
  loop.ddp = loop.has("data") && !loop.has("shard") && !loop.has("pipeline") && !loop.has("expert") && draw.chance(30);
  loop.scaled = !loop.ddp && !loop.has("shard") && !loop.has_norm() && draw.chance(loop.has("expert") ? 80 : 30);
  if (loop.has("shard") && loop.has("pipeline")) loop.scaled = true;
  loop.adamw = is_exact && draw.chance(50);
  if (draw.chance(40)) loop.max_norm = draw.one_of({0.05, 0.5, 1e9});
  if (!loop.has("pipeline") && draw.chance(20)) loop.penalty = 0.1;
  if (loop.has("expert") && !loop.has("pipeline") && !loop.has("data") && !loop.has("context") && draw.chance(50))
    loop.balance = 0.1;
  loop.negative_id = net.embedding && draw.chance(4);
  const bool even = draw.chance(40);
  const bool accumulates = loop.scaled || loop.ddp || loop.has("shard") || even;
  for (int i = draw.between(1, is_exact ? 4 : 2); i > 0; --i) {
    MeshStep step{.extra_forward = draw.chance(15), .evaluates = draw.chance(25), .set_to_none = draw.chance(60)};
    const int batches = accumulates && draw.chance(30) ? 2 : 1;
    for (int j = 0; j < batches; ++j) {
      step.batches.push_back(draw_batch(draw, loop.parts(), loop.has("pipeline") && !draw.chance(10) ? 1 : 0, even));
    }
    step.both_forwards_first = batches == 2 && !loop.has("pipeline") && draw.chance(50);
    step.second_backward_first = step.both_forwards_first && draw.chance(50);
    loop.steps.push_back(std::move(step));
  }
  draw_norm_of_stages(seed, loop);
  return loop;
}

}  // namespace lockstep
