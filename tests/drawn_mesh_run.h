// For tests: runs drawn programs on meshes whose ranks are threads, against one process.
#pragma once

#include <algorithm>

#include "drawn_mesh_loop.h"
#include "drawn_ranks.h"

namespace lockstep {

// The weights and results that a rank has found, by name, such as losses and outputs. exact: what they should be.
// plain: LibTorch's own in 16 bits, for programs in 16 bits.
struct MeshRankEnd {
  Values found, exact, plain = {};
};

// Each copy of the model must come back whole. The ranks that differ in their place on these axes alone have one
// together; the first rank of an axis of shards has those of all.
inline std::string missing_weights(const Axes& axes, const std::vector<MeshRankEnd>& ends, const Values& weights) {
  std::map<std::vector<int>, std::set<std::string>> copies;  // by the places on the other axes
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    std::vector<int> copy;
    int place = static_cast<int>(rank);
    for (auto axis = axes.rbegin(); axis != axes.rend(); place /= axis->size, ++axis) {
      const bool divides = axis->name == "pipeline" || axis->name == "expert" || axis->name == "shard";
      if (!divides) copy.push_back(place % axis->size);
    }
    for (const auto& [name, value] : ends[rank].found) copies[copy].insert(name);
  }
  for (const auto& [copy, names] : copies) {
    for (const auto& [name, value] : weights) {
      if (!names.contains(name)) return text("no rank of the copy of the model at ", join(copy), " returns ", name);
    }
  }
  return "";
}

// Runs body(mesh) on each rank. `refused_by_libtorch`: what a program says in one process, else empty; then there are
// no `weights`, the parameters and buffers that one process ends with.
inline DrawnResult run_on_drawn_mesh(const MeshLoop& loop, const std::string& program, const Values& weights,
                                     const std::string& refused_by_libtorch,
                                     const std::function<MeshRankEnd(const DeviceMesh&)>& body) {
  const auto ended = on_drawn_ranks(loop.ranks(), loop.is_wrong(), [&](const Group& group) {
    const DeviceMesh mesh(loop.axes, {group, kDrawnTimeoutSeconds});
    mesh.ranks().group().barrier(mesh.ranks().deadline());  // before it none hears of what another one throws
    MeshRankEnd end;
    mesh.ranks().abort_on_error([&] { end = body(mesh); });
    return end;
  });
  DrawnResult result{program, ended.refused, ended.wrong, loop.is_wrong()};
  if (result.refused || !result.wrong.empty()) return result;
  if (!refused_by_libtorch.empty()) {
    result.wrong = "was computed, where LibTorch says: " + refused_by_libtorch;
    return result;
  }
  for (std::size_t rank = 0; rank < ended.values.size() && result.wrong.empty(); ++rank) {
    const auto& end = ended.values[rank];
    const auto wrong =
        loop.in_16_bits() ? differences_in_16_bits(end.found, end.exact, end.plain) : differences(end.found, end.exact);
    if (!wrong.empty()) result.wrong = text("rank ", rank, ": ", wrong);
  }
  if (result.wrong.empty()) result.wrong = missing_weights(loop.axes, ended.values, weights);
  return result;
}

}  // namespace lockstep
