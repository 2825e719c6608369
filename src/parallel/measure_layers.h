// How long layers take as a split divides them, and how much memory.
#pragma once

#include <map>
#include <set>

#include "parallel/layer_kinds.h"
#include "parallel/measure_links.h"
#include "parallel/split_profile.h"

namespace lockstep::parallel {

// Every call is collective over the ranks that measure.
class LayerMeasurements {
 public:
  LayerMeasurements(const MeasureInput& input, MeasuredLinks& links) : input_(input), links_(links) {}

  // `examples`: of microbatches. All ranks compute at once, as in training. Where there are no Groups of as many ranks
  // as the division has, each rank rehearses it alone, and what it would have communicated is added.
  DividedLayers measure(const LayerDivision& division, const std::set<std::int64_t>& examples);

 private:
  const LayerKinds& kinds(int tensor);
  void measure_times(const LayerDivision& division, const LayerKinds& kinds, std::vector<LayerProfile>& profiles,
                     const std::set<std::int64_t>& examples, bool& is_computed);
  void measure_bytes(const LayerDivision& division, const LayerKinds& kinds, std::vector<LayerProfile>& profiles,
                     const std::set<std::int64_t>& examples) const;

  const MeasureInput& input_;
  MeasuredLinks& links_;
  std::map<int, LayerKinds> kinds_;                                // by ranks of the tensor axis
  std::map<int, std::vector<std::set<std::int64_t>>> measurable_;  // likewise, by kind: examples that fit
};

}  // namespace lockstep::parallel
