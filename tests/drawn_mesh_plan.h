// For tests: plans of tensor parallelism for the nets of drawn_mesh_net.h, right ones and, on purpose, wrong ones.
#pragma once

#include <algorithm>

#include "drawn_mesh_net.h"

namespace lockstep {

inline std::string describe(const Layout& layout) {
  const auto* const shard = std::get_if<Shard>(&layout);
  return shard == nullptr ? "whole" : text("Shard{", shard->dim, "}");
}
inline std::string describe(const ParallelStyle& style) {
  struct Visitor {
    std::string operator()(const ColwiseParallel& s) const {
      return text("Colwise{", describe(s.input), ", ", describe(s.output), s.parts > 1 ? ", parts}" : "}");
    }
    std::string operator()(const RowwiseParallel& s) const {
      return text("Rowwise{", describe(s.input), ", ", describe(s.output),
                  s.divided_logits ? ", divided_logits}" : "}");
    }
    std::string operator()(const ReplicateParallel& s) const { return text("Replicate{", describe(s.input), "}"); }
    std::string operator()(const SequenceParallel&) const { return "Sequence"; }
    std::string operator()(const Shard& s) const { return describe(Layout(s)); }
  };
  return std::visit(Visitor(), style);
}
inline std::string describe(const ParallelPlan& plan) {
  std::vector<std::string> words;
  for (const auto& [name, style] : plan) words.push_back(text(name, ": ", describe(style)));
  return "{" + join(words, ", ") + "}";
}

struct DrawnPlan {
  ParallelPlan plan;
  bool divided_logits = false;    // for vocabulary_parallel_cross_entropy
  bool divided_sequence = false;  // between layers
  bool wrong = false;             // on purpose
};

// The layers that each kind may have divided, with whole activations between layers.
inline ParallelPlan plan_of_layer(Draw& draw, Kind kind, const std::string& name) {
  const ColwiseParallel columns, whole_columns{.output = Replicate()};
  const RowwiseParallel rows, whole_rows{.input = Replicate()};
  const auto one = [&](const std::string& layer) -> ParallelPlan {
    const bool by_columns = draw.chance(50);
    return {{layer, by_columns ? ParallelStyle(whole_columns) : ParallelStyle(whole_rows)}};
  };
  switch (kind) {
    case Kind::feed_forward: return {{name + ".up", columns}, {name + ".down", rows}};
    case Kind::attention: return {{name + ".qkv", columns}, {name + ".out", rows}};
    case Kind::multi_query:
      return {{name + ".q", columns},
              {name + ".k", ReplicateParallel()},
              {name + ".v", ReplicateParallel()},
              {name + ".out", rows}};
    case Kind::tied:
    case Kind::masked: return one(name);  // a weight of the block's own
    case Kind::layer_norm:
    case Kind::batch_norm:
    case Kind::experts: return {};
    default: return one(name + ".first");
  }
}

inline void draw_ends(Draw& draw, const MeshNetOptions& net, bool context, DrawnPlan& plan) {
  auto& entries = plan.plan;
  const ColwiseParallel columns, whole_columns{.output = Replicate()};
  const auto head = std::to_string(net.count() - 1) + ".head";
  const bool tied = net.tie != Tie::none;
  if (net.embedding && draw.chance(70)) {
    const bool divided = tied && net.tie != Tie::assigned && draw.chance(40);
    plan.divided_logits = divided;
    if (divided || draw.chance(60)) {
      entries.emplace_back("0.token", RowwiseParallel{.divided_logits = divided});
    } else {
      entries.emplace_back("0.token", whole_columns);
    }
    const auto* const rows = std::get_if<RowwiseParallel>(&entries.back().second);
    if (net.tie == Tie::assigned && rows != nullptr && draw.chance(50)) {
      entries.emplace_back(head, columns);
      plan.divided_logits = true;
    }
  } else if (!net.embedding && draw.chance(40)) {
    if (draw.chance(50)) {
      entries.emplace_back("0.front", whole_columns);
    } else {
      entries.emplace_back("0.front", RowwiseParallel{.input = Replicate()});
    }
  }
  if (net.places && !context && draw.chance(40)) entries.emplace_back("0.place", whole_columns);
  if (tied || draw.chance(30)) return;
  plan.divided_logits = draw.chance(50);
  if (plan.divided_logits) {
    entries.emplace_back(head, columns);
  } else if (draw.chance(50)) {
    entries.emplace_back(head, whole_columns);
  } else {
    entries.emplace_back(head, RowwiseParallel{.input = Replicate()});
  }
}

// Between the layers each rank has a part of the positions. Only of nets of feed_forward, attention, multi_query and
// layer_norm, to logits of tokens.
inline DrawnPlan draw_sequence_plan(Draw& draw, const MeshNetOptions& net) {
  const Layout sequence = Shard{1};
  const ColwiseParallel columns{.input = sequence};
  const RowwiseParallel rows{.output = sequence};
  DrawnPlan plan{.divided_logits = draw.chance(50), .divided_sequence = true};
  auto& entries = plan.plan;
  if (net.embedding) {
    entries.emplace_back("0.token", RowwiseParallel{.output = sequence});
  } else {
    entries.emplace_back("0.front", RowwiseParallel{.input = Replicate(), .output = sequence});
  }
  if (net.places) entries.emplace_back("0.place", SequenceParallel());
  for (std::size_t i = 0; i < net.layers.size(); ++i) {
    const auto name = std::to_string(i + 1);
    if (net.layers[i] == Kind::layer_norm) {
      entries.emplace_back(name + ".norm", SequenceParallel());
      continue;
    }
    for (auto [layer, style] : plan_of_layer(draw, net.layers[i], name)) {
      if (std::holds_alternative<ColwiseParallel>(style)) style = columns;
      if (std::holds_alternative<RowwiseParallel>(style)) style = rows;
      if (std::holds_alternative<ReplicateParallel>(style)) style = ReplicateParallel{.input = sequence};
      entries.emplace_back(layer, style);
    }
  }
  entries.emplace_back(
      std::to_string(net.count() - 1) + ".head",
      ColwiseParallel{.input = sequence, .output = plan.divided_logits ? Layout(Shard{-1}) : Replicate()});
  return plan;
}

// `narrow`: a part of a parameter may have one element along a dimension, and would broadcast unseen.
inline ParallelStyle draw_style(Draw& draw, bool narrow) {
  const auto layout = [&]() -> Layout {
    if (draw.chance(50)) return Replicate();
    return Shard{draw.one_of({-1, 0, 1})};
  };
  switch (draw.between(0, narrow ? 3 : 4)) {
    case 0: return ColwiseParallel{.input = draw.chance(70) ? Replicate() : layout(), .output = layout()};
    case 1: return RowwiseParallel{.input = layout(), .output = draw.chance(70) ? Replicate() : layout()};
    case 2: return ReplicateParallel();
    case 3: return SequenceParallel();
    default: return Shard{draw.between(0, 1)};
  }
}

// Leaves an entry out, gives a layer another style, or divides one that the plan leaves whole.
inline void make_wrong(Draw& draw, DrawnPlan& plan, const MeshNetImpl& net, bool narrow) {
  plan.wrong = true;
  const auto any = [&](std::size_t size) {
    return static_cast<std::size_t>(draw.between(0, static_cast<int>(size) - 1));
  };
  const int how = draw.between(0, 2);
  auto& entries = plan.plan;
  if (how == 0 && entries.size() > 1) {
    entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(any(entries.size())));
  } else if (how == 1 && !entries.empty()) {
    entries[any(entries.size())].second = draw_style(draw, narrow);
  } else {
    const auto modules = net.named_modules("", /*include_self=*/false).keys();
    const auto parameters = net.named_parameters().keys();
    const auto style = draw_style(draw, narrow);
    const auto& names = std::holds_alternative<Shard>(style) ? parameters : modules;
    entries.emplace_back(names[any(names.size())], style);
  }
}

inline DrawnPlan draw_plan(Draw& draw, const MeshNetOptions& net, bool context, bool may_be_wrong) {
  DrawnPlan plan;
  const auto has_sequence_style = [](Kind kind) {
    return kind == Kind::feed_forward || kind == Kind::attention || kind == Kind::multi_query ||
           kind == Kind::layer_norm;
  };
  if (net.tokens && net.tie == Tie::none && !context && draw.chance(50) &&
      std::all_of(net.layers.begin(), net.layers.end(), has_sequence_style)) {
    plan = draw_sequence_plan(draw, net);
  } else {
    draw_ends(draw, net, context, plan);
    for (std::size_t i = 0; i < net.layers.size(); ++i) {
      if (draw.chance(30)) continue;
      for (auto& each : plan_of_layer(draw, net.layers[i], std::to_string(i + 1))) plan.plan.push_back(std::move(each));
    }
  }
  if (may_be_wrong && draw.chance(25)) make_wrong(draw, plan, *MeshNet(net, 0, net.count()), net.width < 4);
  return plan;
}

}  // namespace lockstep
