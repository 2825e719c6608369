// The choice of plan_parallel: a pure function of a profile, the costs of layers, as they are divided, and of links.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/plan.h"
#include "lockstep/parallel/split.h"

namespace lockstep::parallel {

// How the layers of a candidate are divided: by parallelize_module over `tensor` ranks, then by fully_shard over
// `shards`.
struct LayerDivision {
  int tensor = 1;
  Sharding sharding = Sharding::none;
  int shards = 1;  // 1 without sharding

  friend auto operator<=>(const LayerDivision&, const LayerDivision&) = default;
};

// Seconds of a layer for one microbatch, with the communication of its ranks in it. With sharding `backward_input` is
// the whole of backward.
struct LayerTimes {
  double forward = 0;
  double backward_input = 0, backward_weight = 0;
  double accumulate = 0;  // what backward takes longer where there are gradients already
};

// Bytes for one microbatch of a layer that is not sharded.
struct LayerBytes {
  double activations = 0;  // kept for backward, the output included
  double working = 0;      // besides these, parameters and their gradients: most at once
  double input = 0, output = 0;
};

struct LayerProfile {
  double parameter_bytes = 0;                // of a rank of the tensor axis, before sharding
  double trained_bytes = 0;                  // of those that are not frozen: they alone have gradients
  double update_seconds = 0;                 // the optimizer's step on what a rank has of it
  std::map<std::int64_t, LayerTimes> times;  // by examples of a microbatch
  std::map<std::int64_t, LayerBytes> bytes;  // by examples of a microbatch; only without sharding
};

struct DividedLayers {
  std::vector<LayerProfile> layers;
  bool is_computed = false;  // for more ranks than were measured
  std::string refused = {};  // why the layers cannot be divided so
};

// One operation over a number of ranks.
struct LinkTimes {
  int ranks = 2;                                   // that were measured
  std::vector<std::pair<double, double>> seconds;  // by bytes, rising; not empty

  // Between measured sizes a straight line, also beyond the last two. For another number of ranks: of a ring, in which
  // each sends (n - 1) / n of the bytes, in n - 1 turns (Patarasuk and Yuan 2009).
  double at(double bytes, int of_ranks) const {
    const auto share = [](int n) { return static_cast<double>(n - 1) / n; };
    const double turns = static_cast<double>(of_ranks - 1) / (ranks - 1);
    return line(bytes * share(of_ranks) / share(ranks)) + (turns - 1) * seconds.front().second;
  }

 private:
  double line(double bytes) const {
    if (seconds.size() == 1) return seconds[0].second;
    std::size_t i = 1;
    while (i + 1 < seconds.size() && seconds[i].first < bytes) ++i;
    const auto [x0, y0] = seconds[i - 1];
    const auto [x1, y1] = seconds[i];
    return bytes <= x0 ? y0 : y0 + (bytes - x0) * (y1 - y0) / (x1 - x0);
  }
};

struct Profile {
  std::map<LayerDivision, DividedLayers> divisions;
  std::map<int, LinkTimes> averages;  // average_gradients, by ranks of the data axis
  std::map<int, LinkTimes> messages;  // from a stage to the next, by ranks of the tensor axis
};

struct PlanInput {
  int ranks = 1;
  std::size_t layers = 1;
  std::int64_t examples = 1;  // of a step, on all ranks
  const PlanOptions& options;
};

// The measurements that the choice needs.
struct PlanNeeds {
  std::map<LayerDivision, std::set<std::int64_t>> divisions;  // with the examples of microbatches
  std::set<int> data_axes;                                    // sizes of those that average gradients
  std::set<int> tensor_axes;                                  // of meshes with a pipeline
};

// Both throw InvalidArgument where nothing is possible.
PlanNeeds needs_of(const PlanInput& input);
SplitPlan choose_split(const PlanInput& input, const Profile& profile);

}  // namespace lockstep::parallel
