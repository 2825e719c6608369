// How long layers take as a split divides them, and how much memory.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "lockstep/ops/memory.h"
#include "parallel/choose_split.h"
#include "parallel/layer_kinds.h"
#include "parallel/layer_trial.h"
#include "parallel/measure_links.h"

namespace lockstep::parallel {

// Every call is collective over the ranks that measure.
class LayerMeasurements {
 public:
  LayerMeasurements(const MeasureInput& input, MeasuredLinks& links) : input_(input), links_(links) {}

  // Finds the kinds of layers, and counts memory for the examples of microbatches. Divisions without sharding first.
  void count(const LayerDivision& division, const std::set<std::int64_t>& examples);

  // Then measures times; again, where what disturbed one call shall not decide: the lesser ones count. All ranks
  // compute at once, as in training. Where there are no Groups of as many ranks as the division has, each rank
  // rehearses it alone, and what it would have communicated is added.
  void time(const LayerDivision& division);

  DividedLayers result(const LayerDivision& division) const;

 private:
  struct Measured {
    std::vector<LayerProfile> profiles;  // [kind]
    std::set<std::int64_t> examples;
    bool is_computed = false;
  };

  LayerKinds find(int tensor) const;
  void count_bytes(const LayerKinds& kinds, int tensor, Measured& measured) const;
  void time_kind(const LayerDivision& division, std::size_t kind, Measured& measured,
                 const std::function<double()>& communicated, const TrialGroups& groups) const;
  std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<Tensor>& parameters) const;

  const MeasureInput& input_;
  MeasuredLinks& links_;
  std::map<int, LayerKinds> kinds_;  // by ranks of the tensor axis
  std::map<LayerDivision, Measured> measured_;
};

// Counted by Lockstep's allocator; 0 where LibTorch's own serves.
inline double bytes_in_use() {
  const auto stats = memory_stats();
  return static_cast<double>(stats.reserved_bytes) - static_cast<double>(stats.cached_bytes);
}

}  // namespace lockstep::parallel
