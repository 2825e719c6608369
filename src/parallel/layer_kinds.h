// Finds the layers of a model that cost the same, so that one of each kind is measured.
#pragma once

#include <string>
#include <vector>

#include "lockstep/parallel/plan.h"

namespace lockstep::parallel {

struct MeasureInput {
  const std::vector<PipelineStage>& layers;  // each of which names its modules by its number in the model
  const Tensor& x;
  const Tensor& target;
  const SplitLoss& loss;
  const PlanOptions& options;
  std::int64_t fewest_examples = 1;  // of a microbatch

  bool is_last(std::size_t layer) const { return layer + 1 == layers.size(); }
};

struct LayerKind {
  std::size_t layer = 0;  // the first of this kind
  ParallelPlan entries;   // of the tensor plan
  Tensor sample;          // its input for the fewest examples
  double parameter_bytes = 0;
  double trained_bytes = 0;  // of those that are not frozen

  // The layer's input for `examples`: of the batch for the first layer, else the sample repeated.
  Tensor input(const MeasureInput& of, std::int64_t examples) const;
};

struct LayerKinds {
  std::vector<std::size_t> of_layers;  // [layer]: which kind
  std::vector<LayerKind> kinds;
  std::string refused;  // why the layers cannot be divided so

  double parameter_bytes() const;  // of all layers
};

// Finds the kinds of layers divided over `tensor` ranks. Makes one layer after the other, and passes the fewest
// examples through. Not collective. Throws InvalidArgument for an entry of the tensor plan that matches nothing and for
// a layer whose output is not floating-point; on one rank also what a layer throws.
LayerKinds find_kinds(const MeasureInput& input, int tensor);

// The first line of what an exception says: LibTorch's go on with their stacks.
std::string first_line(const std::exception& error);

}  // namespace lockstep::parallel
