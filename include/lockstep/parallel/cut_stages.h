// Where to cut a model into stages of a pipeline, by what its layers cost.
//
//   std::vector<lockstep::PipelineStage> layers{[] { return Embed(); }, [] { return Block(); }, ..., [] { return
//   Head(); }}; const auto costs = lockstep::measure_layers(layers, x.narrow(0, 0, 4), mesh["pipeline"]);
//   lockstep::Pipeline pipeline(lockstep::join_layers(layers, lockstep::cut_stages(costs, mesh.size("pipeline"))),
//                               mesh["pipeline"]);
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"
#include "lockstep/parallel/pipeline.h"

namespace lockstep {

// Of one layer: forward and backward of a microbatch in seconds, and its memory in bytes: of parameters, and of what
// forward keeps for the backward of one microbatch (0 on a GPU, and where LibTorch's own allocator serves:
// ops/memory.h).
struct LayerCost {
  double seconds = 0;
  double parameter_bytes = 0;
  double activation_bytes = 0;
};

// Collective. Runs each layer on rank 0, `x` [examples, ...] through the first one, its output through the next, and so
// on: the least of some runs; all ranks get the same. Layers are made one after the other for it, and go to x's device;
// the CPU's random generator is left as it was, so that initial values stay those of the seed. Throws what a layer
// throws, on all ranks.
std::vector<LayerCost> measure_layers(const std::vector<PipelineStage>& layers, const Tensor& x,
                                      const Communicator& ranks);

struct CutOptions {
  // Of a rank: what it keeps of the parameters' size, and the activations of as many microbatches as
  // one_forward_one_backward keeps.
  double most_bytes = std::numeric_limits<double>::infinity();

  // What it keeps of the parameters' size: values, gradients, and two states of an optimizer.
  double parameter_copies = 4;
};

// The number of layers of each stage: the slowest stage is as fast as it can be. Throws InvalidArgument for fewer
// layers than stages, and where no cut keeps the bound.
std::vector<int> cut_stages(const std::vector<LayerCost>& layers, int stages, const CutOptions& options = {});

// Stages of so many layers each, whose modules are called "0", "1", ... by the layers' numbers in the model. Throws
// InvalidArgument where the numbers do not add up to that of the layers.
std::vector<PipelineStage> join_layers(const std::vector<PipelineStage>& layers,
                                       const std::vector<int>& layers_of_stages);

}  // namespace lockstep
